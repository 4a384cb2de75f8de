"""Hosts for system tests: namespaces of this machine that a bridge joins, each with its own address and sshd.

    with make_hosts(tmp_path, 2) as network:      # h1 and h2, and `login`, which reaches both
        network.login.run(["ssh", "h1", "hostname"])
        network["h2"].set_link(up=False)

A host has its own network, host name, /run, /etc/hosts and /etc/ssh, and its own folder `network.disk`, which is the
home of its processes. The rest of the file system is shared. Names and addresses resolve on every host, and `ssh NAME`
works between all of them with keys made for the test; ~/.ssh is neither read nor written. The namespaces have no names
and end with their last process, so test runs do not collide and leave nothing behind.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from echelon.launch.supervision.processes import ChildProcess
from jobs import until
from leaks import MARK, all_pids, command_of, listening_ports

REPOSITORY = Path(__file__).parents[2]
LOGIN = "login"  # the host that has the bridges, and no sshd
SSH_PORT = 22
_PYTHONPATH = os.pathsep.join([str(REPOSITORY / "src"), str(REPOSITORY), str(REPOSITORY / "tests")])

# The first process of a host. It mounts what the host has of its own, reports that, and keeps the namespaces alive.
_FIRST_PROCESS = """
set -e
mount --bind "$1/own" "$1/disk"
mount -t tmpfs none /run
mkdir -p /run/sshd
mount --bind "$1/hosts" /etc/hosts
mount --bind "$1/resolv.conf" /etc/resolv.conf
mount --bind "$1/ssh" /etc/ssh
if [ -d ~/.ssh ]; then mount -t tmpfs none ~/.ssh; fi
echo "$2" > /proc/sys/kernel/hostname
echo ready
exec sleep infinity
"""
_SSH_CONFIG = """
Host *
  IdentityFile /etc/ssh/user_key
  IdentitiesOnly yes
  UserKnownHostsFile /etc/ssh/known_hosts
  GlobalKnownHostsFile /etc/ssh/known_hosts
  StrictHostKeyChecking yes
"""
_SSHD_CONFIG = """
Port {port}
{listen}
HostKey /etc/ssh/host_key
AuthorizedKeysFile /etc/ssh/authorized_keys
PidFile none
StrictModes no
UsePAM no
PermitRootLogin yes
PasswordAuthentication yes
SetEnv {variables}
"""


@dataclass
class Host:
    """One host of a network. Its interfaces are eth0, eth1 … with one address each."""

    name: str
    addresses: list[str]
    folder: Path  # what the host has of its own, as this process sees it
    disk: Path  # the same path on every host, with its own content
    first: ChildProcess
    sshd: ChildProcess | None = None
    variables: dict[str, str] = field(default_factory=dict)
    _num_removed: int = 0

    @property
    def address(self) -> str:
        """The address of the first interface."""
        return self.addresses[0]

    @property
    def own(self) -> Path:
        """The content of this host's `disk`, for this process, which is on no host."""
        return self.folder / "own"

    @property
    def authorized_keys(self) -> Path:
        """The file of keys that may log in; write "" to it so that ssh asks for a password."""
        return self.folder / "ssh" / "authorized_keys"

    def prefix(self, cwd: Path | None = None) -> list[str]:
        """Return the words before a command that let it run on this host."""
        return [
            *("nsenter", f"--target={self.first.pid}", "--net", "--mount", "--uts"),
            *(f"--wdns={cwd or self.disk}", "--"),
        ]

    def start(
        self,
        arguments: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        stdin: int = subprocess.DEVNULL,
        stdout: int = subprocess.PIPE,
        stderr: int = subprocess.PIPE,
    ) -> subprocess.Popen[str]:
        """Start a program on this host. The returned process is the program itself, so signals reach it."""
        return subprocess.Popen(
            [*self.prefix(cwd), *arguments],
            env={**os.environ, **self.variables, **(environment or {})},
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            text=True,
        )

    def run(
        self,
        arguments: Sequence[str],
        *,
        input: str = "",
        check: bool = True,
        timeout_s: float = 60.0,
        environment: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a program on this host and wait for it. `check`: a failing status is an error that shows the output."""
        with self.start(arguments, environment=environment, cwd=cwd, stdin=subprocess.PIPE) as process:
            try:
                out, err = process.communicate(input, timeout_s)
            except BaseException:
                process.kill()
                raise
        done = subprocess.CompletedProcess(list(arguments), process.returncode, out, err)
        if check and done.returncode:
            raise AssertionError(f"{self.name}: {arguments} exited with status {done.returncode}:\n{out}{err}")
        return done

    def processes(self) -> dict[int, str]:
        """Return the command lines of what runs on this host, without its first process and its sshd."""
        own = {self.first.pid, *([self.sshd.pid] if self.sshd else [])}
        network = _network_of(self.first.pid)
        found = {pid: command_of(pid) for pid in all_pids() - own if _network_of(pid) == network}
        return {pid: command for pid, command in found.items() if not command.startswith("(a zombie")}

    def set_link(self, *, up: bool) -> None:
        """Connect or disconnect every interface of this host, as if its cables were pulled."""
        state = "up" if up else "down"
        _ip_batch(self, [f"link set eth{index} {state}" for index in range(len(self.addresses))])

    def hide(self, path: Path) -> None:
        """Let a folder be empty on this host from now on."""
        self.run(["mount", "-t", "tmpfs", "none", str(path)])

    def remove(self, path: Path) -> None:
        """Let a file be missing on this host from now on."""
        self._num_removed += 1
        own, folder = f"/run/removed{self._num_removed}", path.parent
        layers = f"lowerdir={folder},upperdir={own}/upper,workdir={own}/work"
        self.run(["mkdir", "-p", f"{own}/upper", f"{own}/work"])
        self.run(["mount", "-t", "overlay", "-o", layers, "none", str(folder)])
        self.run(["rm", str(path)])

    def kill_all(self) -> None:
        """Kill everything that runs on this host, except its first process and its sshd."""
        while found := self.processes():
            for pid in found:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def start_sshd(self, *settings: str) -> None:
        """Start the sshd of this host with further lines of its configuration, and wait until it listens."""
        config = self.folder / "ssh" / "sshd_config"
        listen = "\n".join(f"ListenAddress {address}" for address in self.addresses)
        variables = " ".join(f'"{name}={value}"' for name, value in self.variables.items())
        config.write_text(_SSHD_CONFIG.format(port=SSH_PORT, listen=listen, variables=variables) + "\n".join(settings))
        log = str(self.folder / "sshd.log")
        command = [*self.prefix(), "/usr/sbin/sshd", "-D", "-E", log, "-f", "/etc/ssh/sshd_config"]
        self.sshd = sshd = ChildProcess(f"sshd of {self.name}", command, {})
        until(lambda: SSH_PORT in listening_ports(sshd.pid), f"sshd of {self.name} listens; see {log}")

    def close(self) -> None:
        """End everything on this host, which also removes its namespaces."""
        if self.sshd is not None:
            self.sshd.close()
            self.sshd = None
        self.kill_all()
        self.first.close()


@dataclass
class Network:
    """The hosts of a test by name. `disk` is a folder with other content on every host."""

    login: Host
    hosts: list[Host]
    disk: Path

    def __getitem__(self, name: str) -> Host:
        return next(host for host in [self.login, *self.hosts] if host.name == name)

    def write_hosts_file(self, *lines: str) -> Path:
        """Write a hosts file for the launcher on `login`, by default with the names of all hosts."""
        path = self.login.own / "hosts"
        path.write_text("".join(f"{line}\n" for line in lines or [host.name for host in self.hosts]))
        return self.disk / "hosts"

    def processes(self) -> dict[str, dict[int, str]]:
        """Return what runs on each host that runs something."""
        return {host.name: found for host in [self.login, *self.hosts] if (found := host.processes())}

    def assert_nothing_runs(self, within_s: float = 5.0) -> None:
        """Fail if anything still runs on any host. sshd needs a moment to end the processes of a closed connection."""
        with suppress(AssertionError):
            until(lambda: not self.processes(), "everything has ended", within_s)
        if left := self.processes():
            raise AssertionError(f"still running: {left}")


@contextmanager
def make_hosts(folder: Path, count: int, *, sshd: bool = True, networks: int = 1) -> Iterator[Network]:
    """Make hosts h1 … h`count` and `login`, joined by one bridge per network; host k has address 10.77.network.k."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [LOGIN, *(f"h{number}" for number in range(1, count + 1))]
    numbers = {LOGIN: 254, **{name: number for number, name in enumerate(names) if name != LOGIN}}
    addresses = {name: [f"10.77.{network}.{numbers[name]}" for network in range(networks)] for name in names}
    keys = _make_keys(folder, addresses)
    disk = folder / "disk"
    disk.mkdir()
    with ExitStack() as stack:
        hosts: dict[str, Host] = {}
        for name in names:
            _write_files(folder / name, addresses, keys)
            hosts[name] = host = _start_host(name, addresses[name], folder / name, disk)
            stack.callback(host.close)
        _connect(hosts)
        for name in names[1:]:
            if sshd:
                hosts[name].start_sshd()
        yield Network(hosts[LOGIN], [hosts[name] for name in names[1:]], disk)


def _make_keys(folder: Path, addresses: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return the files of /etc/ssh that all hosts share: one user key and one host key for all of them."""
    for kind in ("user_key", "host_key"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", kind, "-f", folder / kind], check=True, timeout=60
        )
    names = ",".join([*addresses, *(address for those in addresses.values() for address in those)])
    return {
        "user_key": (folder / "user_key").read_text(),
        "host_key": (folder / "host_key").read_text(),
        "authorized_keys": (folder / "user_key.pub").read_text(),
        "known_hosts": f"{names} {(folder / 'host_key.pub').read_text()}",
        "ssh_config": _SSH_CONFIG,
    }


def _write_files(folder: Path, addresses: Mapping[str, Sequence[str]], keys: Mapping[str, str]) -> None:
    """Write what a host mounts over the files of this machine."""
    (folder / "ssh").mkdir(parents=True)
    (folder / "own").mkdir()
    (folder / "disk").symlink_to(folder.parent / "disk")
    (folder / "resolv.conf").touch()
    lines = ["127.0.0.1 localhost", *(f"{those[0]} {name}" for name, those in addresses.items())]
    # torch asks for the names of its addresses as IPv6 writes them, and warns if there are none.
    lines += [f"::ffff:{address} {name}.mapped" for name, those in addresses.items() for address in those]
    (folder / "hosts").write_text("\n".join(lines) + "\n")
    for name, text in keys.items():
        (folder / "ssh" / name).write_text(text)
        (folder / "ssh" / name).chmod(0o600)


def _start_host(name: str, addresses: list[str], folder: Path, disk: Path) -> Host:
    command = ["unshare", "--net", "--mount", "--uts", "--propagation=private", "sh", "-c", _FIRST_PROCESS]
    first = ChildProcess(name, [*command, "sh", str(folder), name], {})
    assert first.stdout is not None
    if (line := first.stdout.readline()) != b"ready\n":
        error = (line + first.stdout.read()).decode()
        first.close()
        raise AssertionError(f"host {name} cannot be made (needs root): {error}")
    paths = os.pathsep.join(filter(None, [_PYTHONPATH, os.environ.get("PYTHONPATH")]))
    python = os.path.dirname(sys.executable)
    search = os.pathsep.join([python, "/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"])
    variables = {"HOME": str(disk), "PATH": search, "PYTHONPATH": paths, MARK: os.environ.get(MARK, "")}
    return Host(name, addresses, folder, disk, first, variables=variables)


def _connect(hosts: Mapping[str, Host]) -> None:
    """Put a bridge per network into `login`, which has its address, and join every host to it by a veth pair."""
    login = hosts[LOGIN]
    others = [host for host in hosts.values() if host is not login]
    for index, address in enumerate(login.addresses):
        lines = ["link set lo up", f"link add eth{index} type bridge", f"addr add {address}/24 dev eth{index}"]
        lines += [f"link set eth{index} up"]
        for host in others:
            port = f"{host.name}-{index}"
            lines += [f"link add {port} type veth peer name eth{index} netns {host.first.pid}"]
            lines += [f"link set {port} master eth{index} up"]
        _ip_batch(login, lines)
        for host in others:
            lines = ["link set lo up", f"addr add {host.addresses[index]}/24 dev eth{index}", f"link set eth{index} up"]
            _ip_batch(host, lines)


def _ip_batch(host: Host, lines: Sequence[str]) -> None:
    host.run(["ip", "-batch", "-"], input="\n".join(lines) + "\n")


def _network_of(pid: int) -> int | None:
    try:
        return os.stat(f"/proc/{pid}/ns/net").st_ino
    except OSError:
        return None  # the process has ended
