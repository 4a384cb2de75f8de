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
from pathlib import Path
from tempfile import TemporaryDirectory

from echelon.cluster.messages import WORKER, WorkerExited
from echelon.environment import Job
from echelon.launch.addresses import announced_address
from echelon.launch.agents.messages import Bind, ReportExit, Start
from echelon.launch.agents.remote import RemoteProcess
from echelon.launch.joining import JoinedFile
from echelon.launch.plan import SCHEDULER, Address, Addresses, Plan, PlannedProcess
from echelon.launch.report import report_worker_exit
from echelon.launch.shared_folder import SharedFolder
from echelon.launch.supervision.processes import ChildProcess, RunningProcess
from echelon.system import code_digest
from echelon.transport.listening import listen

START_S = 60.0  # for the agents of all hosts to start

Connect = Callable[[PlannedProcess], RemoteProcess]


@dataclass(slots=True)
class AgentPlace:
    """A process behind an agent, and how far its start has come."""

    planned: PlannedProcess
    process: RemoteProcess
    deadline: float  # for its start
    checked: bool = False
    asked_to_bind: bool = False
    started: bool = False
    is_restart: bool = False


class AgentBackend:
    """Starts processes through agents; the scheduler, if the plan has it on this machine, as a child.

    `connect` starts or awaits the agent of a process; `reconnects`: it can do so again after an agent was lost.
    `folder` is the working directory of all processes. `address` is that of this machine, at which the hosts reach it.
    """

    def __init__(
        self,
        plan: Plan,
        connect: Connect,
        *,
        folder: str | None = None,
        start_s: float = START_S,
        address: str | None = None,
        reconnects: bool = False,
    ) -> None:
        self._plan = plan
        self._reconnects = reconnects
        self._connect = connect
        self._own_address = address
        self._folder = os.getcwd() if folder is None else folder
        self._start_s = start_s
        self._deadline = time.monotonic() + start_s
        self._places: dict[str, AgentPlace] = {}
        self._digest = code_digest()
        self._own_scheduler: _OwnScheduler | None = None
        self._known: Addresses | None = None  # once all ports are known
        self._shared = SharedFolder(plan.request.shared_folder)
        self._stopping = False
        self._on_joined: Callable[[list[str]], None] = lambda lines: None

    def start(self, planned: PlannedProcess) -> RunningProcess:
        """Begin to start a process. `turn` does the rest."""
        if planned.host is None and planned.role == SCHEDULER:
            listening_at = self._own_address or self._announced_address(planned)
            self._own_scheduler = _OwnScheduler(self._plan, listening_at)
            return self._own_scheduler.start(planned)
        return self._place(AgentPlace(planned, self._connect(planned), self._deadline))

    def _place(self, place: AgentPlace) -> RemoteProcess:
        place.process.on_joined = lambda lines: self._on_joined(lines)
        self._places[place.planned.name] = place
        return place.process

    def can_restart(self, planned: PlannedProcess) -> bool:
        """Return whether its agent is there. Another one can take the place of a lost agent, but not its address."""
        place = self._places.get(planned.name)
        if place is None or place.process.has_reported_end:
            return True
        return self._reconnects and planned.role != SCHEDULER

    def restart(self, planned: PlannedProcess) -> RunningProcess:
        """Begin to start a process again, through the same agent or, if that was lost, a new one."""
        place = self._places.get(planned.name)
        if place is None:
            assert self._own_scheduler is not None
            return self._own_scheduler.start(planned)
        has_agent = place.process.has_reported_end
        process = place.process.restarted() if has_agent else self._connect(planned)
        deadline = time.monotonic() + START_S
        return self._place(AgentPlace(planned, process, deadline, has_agent, asked_to_bind=True, is_restart=True))

    def scheduler_address(self) -> Address | None:
        """Return where the scheduler listens, once that is known."""
        return self._known.scheduler if self._known else None

    def release(self, planned: PlannedProcess) -> None:
        """Let the agent of a process that has ended for good end."""
        if place := self._places.get(planned.name):
            place.process.release()
        elif self._own_scheduler is not None:
            self._own_scheduler.close()

    def on_joined(self, handler: Callable[[list[str]], None]) -> None:
        """Pass lines of the file of joined workers to a handler."""
        self._on_joined = handler

    def turn(self) -> None:
        """Send what is due. Called several times per second.

        No process is started before all agents are there, and if one cannot be started, the job ends.
        """
        if self._own_scheduler is not None and (lines := self._own_scheduler.new_notes()):
            self._on_joined(lines)
        if any(place.process.pid is None and (place.process.exit_code() or 0) > 0 for place in self._first_starts()):
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
        if all(place.checked and place.process.exit_code() is None for place in self._first_starts()):
            self._known = self._known or self._addresses()
        for place in waiting:
            if place.process.exit_code() is None and place.checked:
                self._advance(place, self._known)
        if late := [place for place in waiting if time.monotonic() > place.deadline]:
            self._give_up(late)

    def _first_starts(self) -> list[AgentPlace]:
        return [place for place in self._places.values() if not place.is_restart]

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
        elif self._own_scheduler is not None:
            report_worker_exit(self._own_scheduler.job, exited)

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
        own = self._own_scheduler.address if self._own_scheduler else None
        scheduler, first = self._bound(f"{SCHEDULER} 0") or own, self._bound(f"{WORKER} 0")
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

    def _announced_address(self, planned: PlannedProcess) -> str:
        hosts = [host.name for host in self._plan.hosts()]
        return announced_address(planned.job.interface, os.uname().nodename, hosts)


class _OwnScheduler:
    """A scheduler on the machine of the launcher: its socket, which outlives the process, and its notes."""

    def __init__(self, plan: Plan, address: str) -> None:
        self._listener = listen(address)
        self._folder = TemporaryDirectory(prefix="echelon-")
        self._notes: JoinedFile | None = JoinedFile(Path(self._folder.name) / "joined")
        self.address = Address(*self._listener.getsockname()[:2])
        self._plan = plan

    @property
    def job(self) -> Job:
        """The job with the address of the scheduler."""
        return self._complete(self._plan.processes[0]).job

    def start(self, planned: PlannedProcess) -> RunningProcess:
        """Start the process, the first time or again."""
        whole, fd = self._complete(planned), self._listener.fileno()
        assert self._notes is not None
        variables = {**whole.environment, "ECHELON_LISTEN_FD": str(fd), "ECHELON_JOINED_FILE": str(self._notes.path)}
        process = ChildProcess(planned.name, whole.arguments, variables, pass_fds=[fd], shielded=True)
        if not planned.job.max_restarts:
            self._listener.close()
        return process

    def new_notes(self) -> list[str]:
        """Return the notes since the last call."""
        return self._notes.new_lines() if self._notes is not None else []

    def close(self) -> None:
        """Stop listening, and remove the notes. A second call does nothing."""
        self._notes = None
        self._listener.close()
        self._folder.cleanup()

    def _complete(self, planned: PlannedProcess) -> PlannedProcess:
        return self._plan.complete(planned, Addresses(self.address, self.address))
