"""Starting the processes of a plan through agents, once it is known where the scheduler and worker 0 listen.

Each agent says `Hello`. The agents of processes that listen then bind a free port of their own machine. When all ports
are known, every process is started with complete addresses, so no port is ever guessed.
"""

from __future__ import annotations

import ipaddress
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from echelon.cluster.messages import WORKER, WorkerExited
from echelon.launch.addresses import announced_address
from echelon.launch.agents.messages import Bind, ReportExit, Start
from echelon.launch.agents.remote import RemoteProcess
from echelon.launch.plan import SCHEDULER, Address, Addresses, Plan, PlannedProcess
from echelon.launch.processes import ChildProcess, RunningProcess
from echelon.launch.report import report_worker_exit
from echelon.launch.shared_folder import SharedFolder
from echelon.system import code_digest
from echelon.transport.listening import listen

START_S = 60.0  # for the agents of all hosts to start

Connect = Callable[[PlannedProcess], RemoteProcess]


@dataclass(slots=True)
class AgentPlace:
    """A process behind an agent, and how far its start has come."""

    planned: PlannedProcess
    process: RemoteProcess
    checked: bool = False
    asked_to_bind: bool = False
    started: bool = False


class AgentBackend:
    """Starts processes through agents; the scheduler, if the plan has it on this machine, as a child.

    `connect` starts or awaits the agent of a process. `folder` is the working directory of all processes. `address` is
    that of this machine, at which the hosts reach it.
    """

    def __init__(
        self,
        plan: Plan,
        connect: Connect,
        *,
        folder: str | None = None,
        start_s: float = START_S,
        address: str | None = None,
    ) -> None:
        self._plan = plan
        self._connect = connect
        self._own_address = address
        self._folder = os.getcwd() if folder is None else folder
        self._start_s = start_s
        self._deadline = time.monotonic() + start_s
        self._places: dict[str, AgentPlace] = {}
        self._digest = code_digest()
        self._scheduler: Address | None = None
        self._shared = SharedFolder(plan.request.shared_folder)
        self._stopping = False
        self._on_joined: Callable[[list[str]], None] = lambda lines: None

    def start(self, planned: PlannedProcess) -> RunningProcess:
        """Begin to start a process. `turn` does the rest."""
        if planned.host is None and planned.role == SCHEDULER:
            return self._start_scheduler(planned)
        process = self._connect(planned)
        process.on_joined = lambda lines: self._on_joined(lines)
        self._places[planned.name] = AgentPlace(planned, process)
        return process

    def on_joined(self, handler: Callable[[list[str]], None]) -> None:
        """Pass lines of the file of joined workers to a handler."""
        self._on_joined = handler

    def turn(self) -> None:
        """Send what is due. Called several times per second.

        No process is started before all agents are there, and if one cannot be started, the job ends.
        """
        if any(place.process.pid is None and (place.process.exit_code() or 0) > 0 for place in self._places.values()):
            self._stop()
            return
        for place in self._places.values():
            place.process.tick()
            if place.process.hello and not place.checked:
                self._check(place)
        waiting = [place for place in self._places.values() if not place.started]
        if not waiting:
            if all(place.process.pid is not None for place in self._places.values()):
                self._shared.unmark()
            return
        ready = all(place.checked and place.process.exit_code() is None for place in self._places.values())
        addresses = self._addresses() if ready else None
        for place in waiting:
            if place.process.exit_code() is None and place.checked:
                self._advance(place, addresses)
        if time.monotonic() > self._deadline:
            self._give_up(waiting)

    def _stop(self) -> None:
        """Stop what has started or is about to, once. The supervisor has handled the failure that is the cause."""
        self._shared.unmark()
        stopping, self._stopping = self._stopping, True
        for place in self._places.values():
            place.process.tick()
            if not stopping:
                place.process.send_signal(signal.SIGTERM)

    def _give_up(self, waiting: Sequence[AgentPlace]) -> None:
        """End processes that did not start in time. Those without an agent keep the others waiting."""
        silent = [place for place in waiting if place.process.hello is None and place.process.exit_code() is None]
        names = ", ".join(f"{place.planned.name} on {place.process.host}" for place in silent)
        why = f"; no agent has connected for {names}" if silent else ""
        for place in silent or waiting:
            place.process.fail(f"did not start on {place.process.host} within {self._start_s:g} s{why}")

    def report_exit(self, exited: WorkerExited) -> None:
        """Tell the scheduler that a worker's process has ended."""
        if scheduler := self._places.get(f"{SCHEDULER} 0"):
            scheduler.process.send(ReportExit(exited.rank, exited.how, exited.failed))
        elif self._scheduler is not None:
            planned = self._plan.complete(self._plan.processes[0], Addresses(self._scheduler, self._scheduler))
            report_worker_exit(planned.job, exited)

    def _advance(self, place: AgentPlace, addresses: Addresses | None) -> None:
        planned = place.planned
        if planned.listens and not place.asked_to_bind:
            place.asked_to_bind = True
            place.process.send(self._bind(place))
        elif addresses is not None:
            place.started = True
            whole = self._plan.complete(planned, addresses)
            words, variables, mark = list(whole.arguments), whole.environment, self._shared.mark()
            place.process.send(Start(planned.name, words, variables, self._folder, planned.local_workers, mark))

    def _bind(self, place: AgentPlace) -> Bind:
        """Return the request for a listening socket. Without a hosts file, the launcher's machine is the known peer."""
        interface, host = place.planned.job.interface, place.planned.host
        if host is not None or self._own_address is None:
            return Bind(interface, str(host or place.process.host), [host.name for host in self._plan.hosts()])
        if ipaddress.ip_address(self._own_address).is_loopback:
            return Bind(interface, self._own_address, [])
        return Bind(interface, place.process.host, [self._own_address])

    def _addresses(self) -> Addresses | None:
        """Return where scheduler and worker 0 listen, once both are known."""
        scheduler, first = self._bound(f"{SCHEDULER} 0") or self._scheduler, self._bound(f"{WORKER} 0")
        if first is None or (self._plan.job.num_servers and scheduler is None):
            return None
        return Addresses(scheduler or first, first)

    def _bound(self, name: str) -> Address | None:
        place = self._places.get(name)
        return place.process.bound if place else None

    def _check(self, place: AgentPlace) -> None:
        place.checked = True
        hello = place.process.hello
        assert hello is not None
        if hello.digest != self._digest:
            place.process.fail(
                f"cannot start: its Echelon has other code (digest {hello.digest}) than the "
                f"launcher's (digest {self._digest}); install the same on both, or copy it with --sync-dst-dir"
            )

    def _start_scheduler(self, planned: PlannedProcess) -> RunningProcess:
        listener = listen(self._own_address or self._announced_address(planned))
        self._scheduler = Address(*listener.getsockname()[:2])
        whole = self._plan.complete(planned, Addresses(self._scheduler, self._scheduler))
        environment = {**whole.environment, "ECHELON_LISTEN_FD": str(listener.fileno())}
        with listener:
            fds = [listener.fileno()]
            return ChildProcess(planned.name, whole.arguments, environment, pass_fds=fds, shielded=True)

    def _announced_address(self, planned: PlannedProcess) -> str:
        hosts = [host.name for host in self._plan.hosts()]
        return announced_address(planned.job.interface, os.uname().nodename, hosts)
