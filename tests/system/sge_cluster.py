"""A Grid Engine for system tests: sge_qmaster on `login`, one sge_execd on each host of a test network.

    with make_hosts(tmp_path, 2, sshd=False) as network, start_sge(network, tmp_path / "sge") as sge:
        sge.run(["qhost"])

All files are in one folder, and the daemons end with the context. One queue has SLOTS slots on every host.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from hosts import Host, Network

from echelon.launch.supervision.processes import ChildProcess
from jobs import until

SLOTS = 4
_INSTALLED = Path("/var/lib/gridengine")
_PROGRAMS = Path("/usr/lib/gridengine")
_SETTINGS = Path("/usr/share/gridengine")
_BOOTSTRAP = """
admin_user none
default_domain none
ignore_fqdn true
spooling_method berkeleydb
spooling_lib libspoolb
spooling_params {folder}/database
binary_path /usr/lib/gridengine
qmaster_spool_dir {folder}/qmaster
security_mode none
listener_threads 2
worker_threads 2
scheduler_threads 1
"""


@dataclass(frozen=True)
class Sge:
    """A running Grid Engine. Commands run on `login`, with `variables`."""

    login: Host
    folder: Path
    variables: Mapping[str, str]

    def run(self, arguments: Sequence[str], **more: bool | float) -> subprocess.CompletedProcess[str]:
        """Run a program on `login`."""
        return self.login.run(arguments, environment=self.variables, **more)  # type: ignore[arg-type]

    def jobs(self) -> list[str]:
        """Return the lines of `qstat` about jobs that have not ended."""
        return self.run(["qstat"]).stdout.splitlines()[2:]

    def configure(self, show: Sequence[str], load: str, **values: str) -> None:
        """Change values of a configuration: `show` prints it, the option `load` reads it from a file."""
        text = _with_values(self.run(["qconf", *show]).stdout, values)
        path = self.folder / f"settings{load}"
        path.write_text(text)
        self.run(["qconf", load, str(path)])


@contextmanager
def start_sge(network: Network, folder: Path) -> Iterator[Sge]:
    """Run Grid Engine on the hosts of a network."""
    _write_files(folder)
    variables = {
        "SGE_ROOT": str(folder / "root"),
        "SGE_CELL": "default",
        "SGE_QMASTER_PORT": "6444",
        "SGE_EXECD_PORT": "6445",
        "SGE_ARCH": "lx-amd64",
        "SGE_ND": "1",  # the daemons stay in the foreground
    }
    sge = Sge(network.login, folder, variables)
    _make_database(sge)
    with ExitStack() as stack:
        _start(stack, sge, network.login, "sge_qmaster")
        until(lambda: not sge.run(["qconf", "-sh"], check=False).returncode, f"qmaster runs; see {folder}/qmaster")
        for host in network.hosts:
            sge.run(["qconf", "-ah", host.name])
            _start(stack, sge, host, "sge_execd")
        sge.run(["qconf", "-as", network.login.name])
        hosts = " ".join(host.name for host in network.hosts)
        queue = {"qname": "all.q", "hostlist": hosts, "slots": str(SLOTS), "load_thresholds": "NONE", "pe_list": "NONE"}
        sge.configure(["-sq"], "-Aq", **queue)
        sge.configure(["-ssconf"], "-Msconf", schedule_interval="0:0:1", flush_submit_sec="1", flush_finish_sec="1")
        until(lambda: _hosts_report(sge, len(network.hosts)), "all hosts report to qmaster")
        yield sge
        sge.run(["qdel", "-f", "-u", "root"], check=False)


def _write_files(folder: Path) -> None:
    common = folder / "root" / "default" / "common"
    for path in (common, folder / "qmaster" / "job_scripts", folder / "database", folder / "execd"):
        path.mkdir(parents=True)
    for name in ("bin", "lib", "util", "utilbin"):
        (folder / "root" / name).symlink_to(_INSTALLED / name)
    (common / "bootstrap").write_text(_BOOTSTRAP.format(folder=folder).lstrip())
    (common / "act_qmaster").write_text("login\n")


def _make_database(sge: Sge) -> None:
    settings = {
        "execd_spool_dir": str(sge.folder / "execd"),
        "min_uid": "0",  # jobs of root are refused by default
        "min_gid": "0",
        "mailer": "/bin/true",
        "load_report_time": "00:00:01",
    }
    configuration = sge.folder / "configuration"
    configuration.write_text(_with_values((_SETTINGS / "default-configuration").read_text(), settings))
    sge.run([str(_PROGRAMS / "spoolinit"), "berkeleydb", "libspoolb", str(sge.folder / "database"), "init"])
    resources = _SETTINGS / "util" / "resources"
    for kind, value in (
        ("configuration", configuration),
        ("complexes", resources / "centry"),
        ("usersets", resources / "usersets"),
        ("managers", "root"),
    ):
        sge.run([str(_PROGRAMS / "spooldefaults"), kind, str(value)])


def _with_values(text: str, values: Mapping[str, str]) -> str:
    for name, value in values.items():
        text = re.sub(rf"(?m)^{name}\s.*$", f"{name} {value}", text)
    return text


def _start(stack: ExitStack, sge: Sge, host: Host, name: str) -> None:
    with (sge.folder / f"{name}-{host.name}.out").open("wb") as out:
        command = [*host.prefix(), str(_PROGRAMS / name)]
        daemon = ChildProcess(name, command, {**host.variables, **sge.variables}, stdout=out)
    stack.callback(daemon.close)


def _hosts_report(sge: Sge, count: int) -> bool:
    lines = sge.run(["qhost"]).stdout.splitlines()[3:]
    return sum("lx-amd64" in line for line in lines) == count
