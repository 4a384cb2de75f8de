"""`echelon launch`: what it rejects before it starts anything, and what it takes from the environment."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import pytest

from echelon.cli.launch import add_job_arguments, command_of, command_on_hosts, job_from
from echelon.cli.main import main
from echelon.errors import UsageError

TOUCH = ["touch", "started"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "by-host").write_text("elsewhere\n")
    (tmp_path / "latin").write_bytes("0 é\n".encode("latin-1"))
    return tmp_path


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("-i nosuch0", "network interface 'nosuch0' has no IPv4 address (-i or DMLC_INTERFACE); this machine has "),
        ("--stall-seconds -3", "--stall-seconds must be above 0 and finite, not -3"),
        ("--stall-seconds 0", "--stall-seconds must be above 0 and finite, not 0"),
        ("--stall-seconds nan", "--stall-seconds must be above 0 and finite, not nan"),
        ("--staleness -1", "--staleness must be 0 or more, not -1"),
        ("--max-restarts -1", "--max-restarts must be 0 or more, not -1"),
        ("--min-workers 0", "--min-workers must be from 1 to 2 (-n), not 0"),
        ("--min-workers 3", "--min-workers must be from 1 to 2 (-n), not 3"),
        ("--max-workers 1", "--max-workers is 1, but the job starts with 2 workers (-n)"),
        ("--replicas 2", "--replicas must be 0 or 1, not 2"),
        ("--replicas 1", "--replicas 1 needs at least 2 servers, because the second copy of a slice is on another "),
        ("-s 0 --min-workers 2", "--min-workers needs servers (-s 1 or more)"),
        ("-s 0 --max-workers 3", "--max-workers needs servers (-s 1 or more)"),
        ("--run-dir /proc/nope", "--run-dir /proc/nope cannot be created: "),
        ("--run-dir by-host", "--run-dir by-host cannot be created: File exists"),
        ("--groups nosuch", "no groups file nosuch"),
        ("--groups by-host", "by-host line 1: no worker runs on 'elsewhere'; the workers' hosts are 127.0.0.1"),
        ("--groups latin", "latin is not valid UTF-8 (byte 2); save the file as UTF-8"),
        ("--groups 0,1/2", "groups '0,1/2' line 2: worker 2 does not exist; ranks go from 0 to 1"),
        ("--data-sharding nosuch", "--data-allocator 1 needs the file nosuch with one line 'start end' per worker"),
        ("--data-sharding latin", "latin is not valid UTF-8 (byte 2); save the file as UTF-8"),
        ("--data-sharding by-host", "by-host line 1: 'elsewhere' is not two numbers"),
    ],
)
def test_an_invalid_flag_is_rejected_before_anything_starts(
    folder: Path, capsys: pytest.CaptureFixture[str], flags: str, message: str
) -> None:
    assert main(["launch", "-n", "2", "-s", "1", *flags.split(), *TOUCH]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("echelon: ")
    assert message in err
    assert sorted(os.listdir(folder)) == ["by-host", "latin"]


def test_the_launcher_reads_groups_and_data_sharding(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The hosts get what the files say, because the files need not be there, or may be older there."""
    (folder / "hosts").write_text("10.0.0.1\n10.0.0.2\n10.0.0.3\n")
    (folder / "groups").write_text("10.0.0.2\n10.0.0.3 10.0.0.1\n")
    (folder / "data_sharding").write_text("0 0.3\n0.3 0.6\n0.6 1\n")
    flags = "-n 3 -s 3 -H hosts --launcher ssh --groups groups --data-sharding data_sharding --dry-run python train.py"
    assert main(["launch", *flags.split()]) == 0
    out = capsys.readouterr().out
    for setting in ("ECHELON_GROUPS=1/0,2", "ECHELON_DATA_SHARDING='0.0 0.3/0.3 0.6/0.6 1.0'"):
        assert out.count(setting) == out.count("DMLC_ROLE=") == 7


@pytest.mark.parametrize(
    ("flags", "transport", "stall_seconds"), [("", "tcp", 4.0), ("--transport shm --stall-seconds 2", "shm", 2.0)]
)
def test_the_environment_is_used_where_no_flag_is_given(
    monkeypatch: pytest.MonkeyPatch, flags: str, transport: str, stall_seconds: float
) -> None:
    monkeypatch.setenv("ECHELON_TRANSPORT", "tcp")
    monkeypatch.setenv("ECHELON_STALL_SECONDS", "4")
    parser = argparse.ArgumentParser()
    add_job_arguments(parser)
    job = job_from(parser.parse_args(["-n", "1", *flags.split()]))
    assert (job.transport, job.stall_seconds) == (transport, stall_seconds)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", (5, 2, 4, 1)),
        ("--max-restarts 0 --min-workers 1 --max-workers 3 --replicas 0", (0, 1, 3, 0)),
    ],
)
def test_flags_say_which_losses_a_job_survives(
    monkeypatch: pytest.MonkeyPatch, flags: str, expected: tuple[int, int, int, int]
) -> None:
    for name, value in {"MAX_RESTARTS": 5, "MIN_WORKERS": 2, "MAX_WORKERS": 4, "REPLICAS": 1}.items():
        monkeypatch.setenv(f"ECHELON_{name}", str(value))
    parser = argparse.ArgumentParser()
    add_job_arguments(parser)
    job = job_from(parser.parse_args(["-n", "2", *flags.split()]))
    assert (job.max_restarts, job.min_workers, job.max_workers, job.replicas) == expected


def test_a_launcher_that_cannot_restart_processes_says_so(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "train.py").touch()
    given = ["-n", "1", "-s", "1", "--launcher", "inproc", "--dry-run", "--max-restarts"]
    assert main(["launch", *given, "2", "python", "train.py"]) == 0
    out, err = capsys.readouterr()
    assert err == (
        "echelon: warning: --max-restarts has no effect with --launcher inproc: the processes of the job are threads "
        "of one process\n"
    )
    assert "ECHELON_MAX_RESTARTS=0" in out
    assert main(["launch", *given, "0", "python", "train.py"]) == 0
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    ("first_line", "mode", "runs_python"),
    [("import sys", 0o644, True), ("import sys", 0o755, True), ("#!/usr/bin/env python3", 0o755, False)],
)
def test_a_python_file_that_the_system_cannot_run_is_run_by_this_python(
    folder: Path, first_line: str, mode: int, runs_python: bool
) -> None:
    (folder / "train.py").write_text(f"{first_line}\n")
    (folder / "train.py").chmod(mode)
    for name in ("train.py", "./train.py"):
        expected = [sys.executable, name, "--lr", "1"]
        found = command_of([name, "--lr", "1"])
        assert found == (expected[1:] if runs_python is False and "/" in name else expected)
        assert command_on_hosts([name, "--lr", "1"]) == (found if found[0] == name else ["python", *expected[1:]])


def test_hosts_may_have_programs_that_this_machine_does_not_have() -> None:
    assert command_on_hosts(["nosuch.py", "--lr", "1"]) == ["nosuch.py", "--lr", "1"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nosuch", "there is no program 'nosuch'"),
        ("train.py", "there is no program 'train.py'"),
        (".", ". is not a program"),
        ("by-host", "by-host is not a program: it is a folder, or not executable"),
    ],
)
def test_a_program_that_cannot_be_run_is_named_once(name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        command_of([name])


@pytest.mark.parametrize(
    ("flag", "security", "words"),
    [
        ("--insecure", "none", "whoever reaches a port of this job can read and change its weights"),
        ("--no-encryption", "proof", "whoever can read or change packets on the network can read and change"),
    ],
)
def test_flags_that_give_up_protection_say_what(
    flag: str, security: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    add_job_arguments(parser)
    assert job_from(parser.parse_args(["-n", "1"])).security == "auto"
    assert not capsys.readouterr().err
    assert job_from(parser.parse_args(["-n", "1", flag])).security == security
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"echelon: warning: {flag}: ")
    assert words in line
