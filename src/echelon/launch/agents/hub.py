"""The hub: where agents that another system has started (mpirun, srun, qsub) connect to the launcher.

Such a system starts N equal tasks somewhere and numbers them. Each task is an agent (`launch.agents.task`), which
connects to the hub, proves the credentials of the job and says its number in `Hello`. Task number t runs process t of
the plan, counted without the scheduler. An agent without a number gets the next free process.

    hub = Hub(address, Security.of(plan.job))
    backend = AgentBackend(plan, hub.connect, address=address)
    arguments, environment = task_command(), hub.environment("PMI_RANK")  # what the other system has to start
    hub.turn()  # regularly, and whenever hub.fileno() is readable
"""

from __future__ import annotations

import selectors
import sys
from dataclasses import dataclass, field

from echelon.environment import CREDENTIALS, HUB, SECURITY_POLICY, TASK, Job
from echelon.errors import JobError
from echelon.launch.agents.channel_stream import ChannelStream
from echelon.launch.agents.messages import FromAgent, Hello, decode_from_agent
from echelon.launch.agents.remote import RemoteProcess
from echelon.launch.plan import PlannedProcess
from echelon.transport.admission.admission import Admission, Strangers, Unproven
from echelon.transport.admission.credentials import Security
from echelon.transport.framing import FrameReader
from echelon.transport.listening import listen

UNKNOWN_HOST = "an unknown host"


def task_command(python: str = sys.executable) -> list[str]:
    """Return the command of every task.

    With -P, the folder in which the command starts is not searched: it may have files with names of modules.
    """
    return [python, "-P", "-m", "echelon.launch.agents.task"]


def variable_names(job: Job) -> list[str]:
    """Return the names of the variables of `Hub.environment`, for a dry run."""
    return [HUB, TASK, SECURITY_POLICY, *([] if job.security == "none" else [CREDENTIALS])]


@dataclass(slots=True, eq=False)
class _Newcomer:
    """An agent that has proved the credentials, and has not said `Hello` yet."""

    stream: ChannelStream
    reader: FrameReader[FromAgent] = field(default_factory=lambda: FrameReader(decode_from_agent))
    received: bytes = b""


class Hub:
    """Listens for agents, and gives each of them a process of the job.

    Agents may connect before the job needs them, and at any time: `connect` returns processes that have no agent yet.
    """

    def __init__(self, address: str, security: Security) -> None:
        self._security = security
        self._selector = selectors.EpollSelector()
        listener = listen(address)
        self.address: tuple[str, int] = listener.getsockname()[:2]
        self._admission = Admission(listener, security, self._selector, Strangers("the launcher"))
        self._processes: list[RemoteProcess] = []

    def environment(self, task: str) -> dict[str, str]:
        """Return the variables that every task needs.

        `task` is the number of one task, or the name of the variable in which the system that starts the tasks numbers
        them from 0, or "" if it does not. The credentials are among the values: no command line may show them.
        """
        host, port = self.address
        variables = {HUB: f"{host}:{port}", TASK: task, SECURITY_POLICY: self._security.policy}
        credentials = self._security.credentials
        return variables | ({CREDENTIALS: credentials.to_text()} if credentials else {})

    def connect(self, planned: PlannedProcess) -> RemoteProcess:
        """Return the process of the next task, which has no agent yet."""
        process = RemoteProcess(planned.name, str(planned.host or UNKNOWN_HOST))
        self._processes.append(process)
        return process

    @property
    def missing(self) -> list[RemoteProcess]:
        """The processes whose agents have not connected, and which have not been given up."""
        return [process for process in self._processes if not process.has_connected and process.exit_code() is None]

    @property
    def complete(self) -> bool:
        """Whether the agents of all processes have connected."""
        return all(process.has_connected for process in self._processes)

    def fileno(self) -> int:
        """Return what becomes readable when `turn` has something to do."""
        return self._selector.fileno()

    def turn(self) -> None:
        """Accept agents. Never blocks."""
        for key, _ in self._selector.select(0):
            if isinstance(key.data, _Newcomer):
                self._read(key.data)
            elif isinstance(key.data, Admission | Unproven):
                channel = self._admission.advance(key.data)
                if channel is not None:
                    newcomer = _Newcomer(ChannelStream(channel))
                    self._selector.register(newcomer.stream, selectors.EVENT_READ, newcomer)
                    self._read(newcomer)
        self._admission.expire()

    def close(self) -> None:
        """Close the listener, and the connections that have no process."""
        newcomers = [key.data for key in self._selector.get_map().values() if isinstance(key.data, _Newcomer)]
        for newcomer in newcomers:
            self._forget(newcomer)
            newcomer.stream.close()
        self._admission.close()
        self._selector.close()

    def _read(self, newcomer: _Newcomer) -> None:
        while (data := newcomer.stream.read()) is not None:
            newcomer.received += data
            try:
                message = next(newcomer.reader.feed(data), None)
            except JobError as error:
                self._refuse(newcomer, str(error))
                return
            if message is not None:
                self._assign(newcomer, message)
                return
            if not data:
                self._refuse(newcomer, newcomer.stream.why_ended())
                return

    def _assign(self, newcomer: _Newcomer, message: object) -> None:
        if not isinstance(message, Hello):
            self._refuse(newcomer, f"its first message is {type(message).__name__}, not Hello")
            return
        number = self._next_free() if message.task is None else message.task
        if number is None or not 0 <= number < len(self._processes):
            tasks = f"the job has {len(self._processes)} tasks"
            self._refuse(
                newcomer, f"{tasks}, and this is one more" if number is None else f"{tasks}, not task {number}"
            )
            return
        process = self._processes[number]
        if process.has_connected:
            self._refuse(newcomer, f"task {number} already runs {process.name} on {process.host}")
            return
        self._forget(newcomer)
        newcomer.stream.unread(newcomer.received)
        process.connect(newcomer.stream, message.host if process.host == UNKNOWN_HOST else None)

    def _next_free(self) -> int | None:
        return next((number for number, process in enumerate(self._processes) if not process.has_connected), None)

    def _refuse(self, newcomer: _Newcomer, reason: str) -> None:
        self._forget(newcomer)
        try:
            self._admission.strangers.add(newcomer.stream.peer(), reason)
        except OSError:
            pass  # it has disconnected
        newcomer.stream.close()

    def _forget(self, newcomer: _Newcomer) -> None:
        self._selector.unregister(newcomer.stream)
