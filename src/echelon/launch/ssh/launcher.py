"""The ssh launcher: starts an agent over ssh for every process of a job, on the hosts of a hosts file.

One ssh client per process connects the launcher with its agent. If the launcher dies, the kernel ends its ssh clients,
the agents' input ends, and they kill their processes.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from collections import deque
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

from echelon.errors import UsageError
from echelon.launch.agents.coordinate import AgentBackend
from echelon.launch.agents.remote import RemoteProcess
from echelon.launch.agents.streams import ProgramStream
from echelon.launch.hosts import Host
from echelon.launch.interface import Output
from echelon.launch.plan import Plan, PlannedProcess, Request, describe, make_plan
from echelon.launch.run import run_job
from echelon.launch.ssh.client import AGENT, READY, SshClient, explain, module_command, package_folder
from echelon.launch.ssh.sync import NOT_COPIED, Copy, copy_to_hosts
from echelon.launch.supervision.processes import ChildProcess
from echelon.system import PACKAGE

LOGINS_AT_ONCE = 8  # per host: sshd refuses some of more than ten connections that have not logged in (MaxStartups)
MAX_NOISE_BYTES = 1 << 20  # that a shell's start-up files may print before the agent starts


class SshLauncher:
    """Runs every process on a host of the hosts file; the scheduler on the first one."""

    name = "ssh"

    def add_arguments(self, group: argparse._ArgumentGroup) -> None:
        """Add the flags of ssh."""
        group.add_argument("--ssh-config", metavar="FILE", help="configuration file of ssh (default: ~/.ssh/config)")
        group.add_argument(
            "--ssh-option",
            action="append",
            default=[],
            metavar="NAME=VALUE",
            help="option of ssh, as in ssh -o; can be given several times",
        )
        group.add_argument(
            "--ssh-python", metavar="PATH", help="Python of the hosts (default: the path of this Python)"
        )
        group.add_argument(
            "--ssh-exclude",
            action="append",
            default=[],
            metavar="PATTERN",
            help=f"files for --sync-dst-dir to leave out, besides {', '.join(NOT_COPIED)}; can be given several times",
        )

    def plan(self, request: Request) -> Plan:
        """Put servers, then workers, on the hosts in turn."""
        if not request.hosts:
            raise UsageError("--launcher ssh needs the hosts of the job: name a file with one host per line with -H")
        return make_plan(request, scheduler_host=request.hosts[0], python=_python(request))

    def describe(self, plan: Plan) -> str:
        """Return the plan and the command lines of rsync and ssh. What the agents receive is not on them."""
        lines = []
        if copy := _copy(plan.request):
            lines += [shlex.join(copy.rsync_command(host)) for host in plan.hosts()]
        lines += [shlex.join(_command(plan.request, host)) for host in plan.hosts()]
        return "\n".join([describe(plan), "", "commands per host, of which that of ssh runs once per process:", *lines])

    def run(self, plan: Plan, output: Output) -> int:
        """Copy the working directory if that is asked for, and run the job."""
        if copy := _copy(plan.request):
            copy_to_hosts(copy, plan.hosts())
        return run_job(plan, output, _SshBackend(plan))


class _SshBackend(AgentBackend):
    """Agents over ssh. Those of one host log in a few at a time."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan, self._enqueue, folder=plan.request.sync_dst_dir, reconnects=True)
        self._request = plan.request
        self._waiting: deque[tuple[Host, RemoteProcess]] = deque()
        self._logging_in: list[tuple[Host, RemoteProcess]] = []

    def turn(self) -> None:
        """Start the clients whose turn it is."""
        self._logging_in = [
            (host, process)
            for host, process in self._logging_in
            if process.hello is None and process.exit_code() is None
        ]
        for _ in range(len(self._waiting)):
            host, process = self._waiting.popleft()
            if process.exit_code() is not None:
                continue
            if sum(other == host for other, _ in self._logging_in) < LOGINS_AT_ONCE:
                process.connect(open_stream(self._request, host, process.name))
                self._logging_in.append((host, process))
            else:
                self._waiting.append((host, process))
        super().turn()

    def _enqueue(self, planned: PlannedProcess) -> RemoteProcess:
        assert planned.host is not None
        process = RemoteProcess(planned.name, planned.host.name)
        self._waiting.append((planned.host, process))
        return process


class AgentStream(ProgramStream):
    """The stream of an agent, without what the login shell printed before the agent started."""

    def __init__(self, program: ChildProcess, errors: IO[bytes], host: Host, python: str) -> None:
        super().__init__(program, errors, partial(explain, host, python=python))
        self._before: bytes | None = b""  # what came before the agent; None: it has started

    def read(self) -> bytes | None:
        """Return bytes of the agent, None if there are none, or b"" if it has ended."""
        data = super().read()
        if self._before is None or not data:
            return data
        _, found, after = (self._before + data).partition(READY)
        self._before = None if found else (self._before + data)[-MAX_NOISE_BYTES:]
        return after or None


def open_stream(request: Request, host: Host, name: str, module: str = AGENT) -> AgentStream:
    """Run a module of Echelon on a host, and return the stream to it. `name` names it in errors."""
    errors = TemporaryFile()  # noqa: SIM115  (the stream closes it)
    program = ChildProcess(name, _command(request, host, module), {}, stdin=subprocess.PIPE, stderr=errors)
    return AgentStream(program, errors, host, _python(request))


def _command(request: Request, host: Host, module: str = AGENT) -> list[str]:
    folder = package_folder(PACKAGE, Path.cwd(), request.sync_dst_dir)
    return [*_client(request).command(host), module_command(_python(request), folder, module)]


def _client(request: Request) -> SshClient:
    return SshClient(request.options.get("ssh_config"), tuple(request.options.get("ssh_option") or ()))


def _python(request: Request) -> str:
    return request.options.get("ssh_python") or sys.executable


def _copy(request: Request) -> Copy | None:
    if request.sync_dst_dir is None:
        return None
    exclude = (*NOT_COPIED, *(request.options.get("ssh_exclude") or ()))
    return Copy(Path.cwd(), request.sync_dst_dir.rstrip("/") or "/", _client(request), exclude)
