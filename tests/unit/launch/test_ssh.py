"""The ssh launcher: its plan, its dry run, and its stream of an agent."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryFile

import pytest

from echelon.environment import Job
from echelon.errors import UsageError
from echelon.launch.hosts import Host
from echelon.launch.plan import Request
from echelon.launch.ssh.client import READY
from echelon.launch.ssh.launcher import AgentStream, SshLauncher
from echelon.launch.supervision.processes import ChildProcess

HOSTS = (Host("h1"), Host("h2", user="anna", port=2222))
JOB = Job(num_workers=2, num_servers=2, credentials="secret")


def test_processes_go_to_the_hosts_in_turn_and_the_scheduler_to_the_first() -> None:
    plan = SshLauncher().plan(Request(JOB, ["train"], HOSTS, options={"ssh_python": "/opt/python"}))
    places = [(process.name, str(process.host)) for process in plan.processes]
    assert places == [
        ("scheduler 0", "h1"),
        ("server 0", "h1"),
        ("server 1", "h2"),
        ("worker 0", "h1"),
        ("worker 1", "h2"),
    ]
    assert plan.processes[0].arguments == ["/opt/python", "-m", "echelon.scheduler"]


def test_a_job_without_hosts_is_refused() -> None:
    with pytest.raises(UsageError, match="needs the hosts of the job: name a file with one host per line with -H"):
        SshLauncher().plan(Request(JOB, ["train"]))


def test_the_dry_run_shows_the_commands_and_no_secret(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    options = {"ssh_config": "my_config", "ssh_option": ["Compression=yes"], "ssh_exclude": ["data"]}
    launcher = SshLauncher()
    text = launcher.describe(launcher.plan(Request(JOB, ["train"], HOSTS, sync_dst_dir="/there", options=options)))
    *_, first_copy, second_copy, first, second = text.splitlines()
    assert first_copy.startswith("rsync -az ")
    assert first_copy.endswith(f"--exclude=data -- {tmp_path}/ h1:/there/")
    assert second_copy.endswith("h2:/there/")
    assert first.startswith("ssh -T -x -F my_config -o Compression=yes -o BatchMode=yes ")
    assert " -- h1 'exec sh -c " in first
    assert f"exec {sys.executable} -P -m echelon.launch.agents.agent" in first
    assert second.startswith("ssh -T -x -F my_config -l anna -p 2222 ")
    assert "secret" not in text


@pytest.mark.parametrize("noise", [b"", b"Welcome!\n", b"no line end", READY[:-1] + b"?", b"x" * 100_000])
def test_what_a_login_shell_prints_is_not_taken_for_messages(noise: bytes, tmp_path: Path) -> None:
    """A start-up file such as ~/.bashrc may print. The agent's bytes are those after the marker, and all of them."""
    file = tmp_path / "output"
    file.write_bytes(noise + READY + b"first" + READY + b"second")
    errors = TemporaryFile()  # noqa: SIM115  (the stream closes it)
    child = ChildProcess("cat", ["cat", str(file)], {}, stdin=subprocess.PIPE, stderr=errors)
    stream, received = AgentStream(child, errors, Host("h1"), "python"), b""
    try:
        while (data := stream.read()) != b"":
            received += data or b""
    finally:
        stream.close()
    assert received == b"first" + READY + b"second"


def test_the_reason_is_read_after_the_program_has_ended() -> None:
    """ssh closes its output before it writes the reason and exits."""
    errors = TemporaryFile()  # noqa: SIM115  (the stream closes it)
    script = "exec >&-; sleep 0.3; echo 'Timeout, server h1 not responding.' >&2; exit 255"
    child = ChildProcess("sh", ["sh", "-c", script], {}, stdin=subprocess.PIPE, stderr=errors)
    stream = AgentStream(child, errors, Host("h1"), "python")
    try:
        while stream.read() != b"":
            pass
        assert stream.why_ended().startswith("h1 has stopped answering")
    finally:
        stream.close()
