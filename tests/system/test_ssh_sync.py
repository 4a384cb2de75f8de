"""`--sync-dst-dir` and tools that copy, with real programs and hosts."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts import REPOSITORY, Network, make_hosts

from echelon.errors import JobError
from echelon.launch.hosts import Host
from echelon.launch.ssh.client import SshClient
from echelon.launch.ssh.sync import Copy, copy_to_hosts

pytestmark = pytest.mark.system

COPY = """
import sys
from pathlib import Path
from echelon.launch.hosts import read_hosts
from echelon.launch.ssh.sync import Copy, copy_to_hosts
copy_to_hosts(Copy(Path.cwd(), sys.argv[2]), read_hosts(sys.argv[1]))
"""


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    with make_hosts(tmp_path / "network", 2) as network:
        yield network


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Return a folder with code, data, and what is not to be copied."""
    folder = tmp_path / "it's work"
    for path in ["train.py", "data/a.rec", "data/big/b.rec", ".git/config", "lib/.venv/x", "lib/m.py", ".hidden"]:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(path)
    (folder / "link").symlink_to("train.py")
    return folder


def copy_from_login(network: Network, source: Path, destination: str) -> subprocess.CompletedProcess[str]:
    hosts = str(network.write_hosts_file())
    return network.login.run([sys.executable, "-c", COPY, hosts, destination], cwd=source, check=False)


@pytest.mark.parametrize("program", ["rsync", "tar", "tar, because a host has no rsync"])
def test_a_folder_is_copied_to_all_hosts(network: Network, source: Path, program: str) -> None:
    without_rsync = {"rsync": "", "tar": "login"}.get(program, "h2")
    if without_rsync:
        network[without_rsync].remove(Path("/usr/bin/rsync"))
    destination = f"{network.disk}/a/the $re"
    done = copy_from_login(network, source, destination)
    assert done.returncode == 0, done.stderr
    for host in network.hosts:
        there = host.own / "a" / "the $re"
        names = {str(path.relative_to(there)) for path in there.rglob("*") if not path.is_dir()}
        assert names == {"train.py", "data/a.rec", "data/big/b.rec", "lib/m.py", ".hidden", "link"}
        assert f"echelon: copied to {host.name}:{destination} in " in done.stderr
    network.assert_nothing_runs()


def test_a_second_copy_sends_changes_and_deletes_nothing(network: Network, source: Path) -> None:
    destination = f"{network.disk}/there"
    assert copy_from_login(network, source, destination).returncode == 0
    (network["h1"].own / "there" / "result").write_text("of an earlier job")
    (source / "train.py").write_text("changed, and longer")
    assert copy_from_login(network, source, destination).returncode == 0
    assert (network["h1"].own / "there" / "result").exists()
    assert (network["h2"].own / "there" / "train.py").read_text() == "changed, and longer"


def test_a_host_that_cannot_be_written_to_is_named(network: Network, source: Path) -> None:
    (network["h2"].own / "there").write_text("not a folder")
    done = copy_from_login(network, source, f"{network.disk}/there")
    assert done.returncode == 1
    error = done.stderr.splitlines()[-1]
    assert "was not copied to h2: mkdir: cannot create directory" in error
    assert f"{network.disk}/there" in error
    assert (network["h1"].own / "there" / "train.py").exists()


def test_a_checkout_is_copied_as_by_mxnets_script(network: Network) -> None:
    """`cd example/image-classification; python scp_mxnet.py` with a file `hosts`; this machine needs no copy."""
    checkout = network.login.own / "checkout"
    examples = checkout / "examples" / "image-classification"
    examples.mkdir(parents=True)
    (checkout / "src").mkdir()
    (checkout / "src" / "module.py").touch()
    (examples / "hosts").write_text("login\nh1\nh2\n")
    shutil.copy(REPOSITORY / "examples" / "image-classification" / "scp_mxnet.py", examples)
    here = network.disk / "checkout" / "examples" / "image-classification"
    done = network.login.run([sys.executable, "scp_mxnet.py"], cwd=here)
    copied = [line.split()[3] for line in done.stderr.splitlines()[1:]]
    assert sorted(copied) == [f"h1:{network.disk}/checkout", f"h2:{network.disk}/checkout"]
    for host in network.hosts:
        assert (host.own / "checkout" / "src" / "module.py").exists()
        assert (host.own / "checkout" / "examples" / "image-classification" / "hosts").exists()


def test_mxnets_script_says_what_is_wrong(network: Network) -> None:
    script = REPOSITORY / "examples" / "image-classification" / "scp_mxnet.py"
    done = network.login.run([sys.executable, str(script)], check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("scp_mxnet.py: error: the hosts file hosts cannot be read: No such file or directory")


@pytest.mark.parametrize("pattern", ["data", "data/", "data/big", "*.rec", "/data/big/", "big/*.rec", "data/*.rec"])
def test_tar_leaves_out_what_rsync_leaves_out(source: Path, tmp_path: Path, pattern: str) -> None:
    copy = Copy(source, str(tmp_path / "there"), exclude=(pattern,))
    options = [word for word in copy.rsync_command(Host("h1")) if word.startswith(("--exclude", "-a"))]
    subprocess.run(["rsync", *options, f"{source}/", copy.destination], check=True)
    by_rsync = {str(path.relative_to(copy.destination)) for path in Path(copy.destination).rglob("*")}
    assert {str(path) for path, _ in copy.files()} == by_rsync


@pytest.mark.parametrize("program", ["rsync", "tar"])
def test_every_host_that_fails_is_named(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    """Nothing listens at the port, so ssh fails at once."""
    if program == "tar":
        monkeypatch.setattr("shutil.which", lambda name: None)
    config = tmp_path / "config"
    config.write_text("Host *\n  HostName 127.0.0.1\n  Port 1\n")
    copy = Copy(source, "/there", SshClient(config=str(config)))
    with pytest.raises(JobError) as caught:
        copy_to_hosts(copy, [Host("h1"), Host("h2")])
    lines = str(caught.value).splitlines()
    assert len(lines) == 2
    for name, line in zip(["h1", "h2"], lines, strict=True):
        assert line.startswith(f"{source} was not copied to {name}: {name} runs no ssh server at this port")
