"""What `--sync-dst-dir` copies, and by which commands."""

from __future__ import annotations

import io
import shlex
import tarfile
from pathlib import Path

import pytest

from echelon.errors import JobError
from echelon.launch.hosts import Host
from echelon.launch.ssh.client import SshClient
from echelon.launch.ssh.sync import Copy, copy_to_hosts, write_tar


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Return a folder with code, data, and what is not to be copied."""
    folder = tmp_path / "it's work"
    for path in ["train.py", "data/a.rec", "data/big/b.rec", ".git/config", "lib/.venv/x", "lib/m.py", ".hidden"]:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(path)
    (folder / "link").symlink_to("train.py")
    (folder / "empty").mkdir()
    return folder


def copied(copy: Copy) -> set[str]:
    return {str(path) for path, _ in copy.files()}


def test_everything_is_copied_except_version_control_and_environments(source: Path) -> None:
    folders = {"data", "data/big", "lib", "empty"}
    assert copied(Copy(source, "/there")) == folders | {
        "train.py", "data/a.rec", "data/big/b.rec", "lib/m.py", ".hidden", "link"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("pattern", "excluded"),
    [
        ("data", {"data", "data/a.rec", "data/big", "data/big/b.rec"}),
        ("data/big/", {"data/big", "data/big/b.rec"}),
        ("*.rec", {"data/a.rec", "data/big/b.rec"}),
        ("big/b.rec", {"data/big/b.rec"}),
        ("/big/b.rec", set()),
        ("data/*.rec", {"data/a.rec"}),
    ],
)
def test_a_pattern_with_a_slash_matches_the_path(source: Path, pattern: str, excluded: set[str]) -> None:
    assert copied(Copy(source, "/there", exclude=())) - copied(Copy(source, "/there", exclude=(pattern,))) == excluded


def test_the_archive_unpacks_to_the_same_files(source: Path, tmp_path: Path) -> None:
    archive, done = io.BytesIO(), [0.0]
    write_tar(Copy(source, "/there"), archive, done.append)
    archive.seek(0)
    with tarfile.open(fileobj=archive) as unpacked:
        unpacked.extractall(tmp_path / "there", filter="data")
    assert (tmp_path / "there" / "data" / "big" / "b.rec").read_text() == "data/big/b.rec"
    assert (tmp_path / "there" / "link").readlink() == Path("train.py")
    assert done == sorted(done)


def test_paths_are_quoted_for_the_shell_of_the_host(source: Path) -> None:
    copy = Copy(source, "/the $re", SshClient(options=("ProxyCommand=nc %h 22",)))
    host = Host("h1", user="anna", port=2222)
    command = copy.rsync_command(host)
    assert command[-2:] == [f"{source}/", "h1:/the $re/"]
    assert "--rsync-path=mkdir -p -- '/the $re' && rsync" in command
    shell = next(word for word in command if word.startswith("--rsh="))
    assert shlex.split(shell.removeprefix("--rsh=")) == copy.client.login(host)
    there = shlex.split(copy.tar_command(host)[-1])
    assert there == ["exec", "sh", "-c", "mkdir -p -- '/the $re' && exec tar -xzf - -C '/the $re'"]


def test_an_address_of_ipv6_is_not_taken_for_a_path(source: Path) -> None:
    assert Copy(source, "/there").rsync_command(Host("fe80::1"))[-1] == "[fe80::1]:/there/"


def test_tar_does_not_overwrite_the_files_that_it_reads(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(JobError, match="install rsync on both machines"):
        copy_to_hosts(Copy(source, str(source)), [Host("h1")])
