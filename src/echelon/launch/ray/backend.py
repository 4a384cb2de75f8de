"""The launcher's side of a job on Ray: the driver's process, and the agents that Ray's actors run."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from echelon.environment import child_environment, variable
from echelon.launch.agents.coordinate import START_S, AgentBackend, AgentPlace
from echelon.launch.agents.messages import Bind
from echelon.launch.agents.remote import RemoteProcess
from echelon.launch.agents.streams import PipeStream
from echelon.launch.plan import Plan, PlannedProcess
from echelon.launch.ray.placement import (
    Connected,
    Event,
    Failed,
    Lost,
    Placed,
    Placement,
    Waiting,
    decode_event,
    encode,
)
from echelon.launch.supervision.processes import READ_BYTES, RunningProcess

END_S = 20.0  # for the driver to end the actors, and a cluster that it has started
UNPLACED = "Ray"  # the host of a process before Ray has placed it


class DriverProcess:
    """The driver's process, its events, and the launcher's ends of its actors' sockets.

    `lost` has the processes whose actors Ray has lost, with the reason.
    """

    def __init__(self, placement: Placement) -> None:
        """Start a driver. It starts no process of the job before the launcher says so to its agent."""
        self.lost: dict[str, str] = {}
        self._events: list[Event] = []
        self._partial = b""
        self._has_ended = False
        pairs = {actor.name: socket.socketpair() for actor in placement.actors}
        theirs = [other for _, other in pairs.values()]
        self._own = {name: own for name, (own, _) in pairs.items()}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "echelon.launch.ray.driver", *(str(other.fileno()) for other in theirs)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            pass_fds=[other.fileno() for other in theirs],
            start_new_session=True,  # Ctrl-C is for the launcher, which needs the driver to stop the job
            env=child_environment({"RAY_USAGE_STATS_ENABLED": variable("RAY_USAGE_STATS_ENABLED") or "0"}),
        )
        for other in theirs:
            other.close()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        os.set_blocking(self._output.fileno(), False)
        self._input.write(encode(placement))

    def __enter__(self) -> Self:
        """Return the driver."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """End the driver, which ends the actors, and a cluster that it has started."""
        self._input.close()
        for own in self._own.values():
            own.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._output.close()

    def stream(self, name: str) -> PipeStream:
        """Return the stream of a process's agent."""
        return _ActorStream(self._own[name], self, name)

    def new_events(self) -> Sequence[Event]:
        """Return the events since the last call."""
        self._read_events()
        events, self._events = self._events, []
        return events

    def why_lost(self, name: str) -> str:
        """Say why a process's stream has ended."""
        self._read_events()  # the driver sends the reason before it closes the stream
        if name in self.lost:
            return f"Ray lost its actor: {self.lost[name]}"
        if self._has_ended:
            return self._how_ended()
        return "its agent has ended; its actor's log in Ray's dashboard may say why"

    def _how_ended(self) -> str:
        return f"the driver of the job on Ray ended with status {self._process.wait()}"

    def _read_events(self) -> None:
        while data := self._output.read(READ_BYTES):
            *lines, self._partial = (self._partial + data).split(b"\n")
            events = [decode_event(line) for line in lines]
            self.lost |= {event.name: event.reason for event in events if isinstance(event, Lost)}
            self._events += events
        if data == b"" and not self._has_ended:
            self._has_ended = True
            self._events.append(Failed(self._how_ended()))


class _ActorStream(PipeStream):
    """The socket between the launcher and the driver for one actor."""

    def __init__(self, own: socket.socket, driver: DriverProcess, name: str) -> None:
        super().__init__(own.fileno(), own.fileno())
        self._socket, self._driver, self._name = own, driver, name

    def why_ended(self) -> str:
        """Say why the actor has ended."""
        return self._driver.why_lost(self._name)

    def close(self) -> None:
        """End the actor."""
        self._socket.close()


class RayBackend(AgentBackend):
    """Agents that connect when Ray has placed their actors.

    `folder` is the working directory of the processes; None: the launcher's.
    """

    def __init__(self, plan: Plan, driver: DriverProcess, placement: Placement) -> None:
        folder = None if placement.upload is None else "."  # where Ray has started the actor
        super().__init__(plan, self._await_actor, folder=folder, start_s=placement.timeout_s + START_S)
        self._driver = driver
        self._processes: dict[str, RemoteProcess] = {}

    def turn(self) -> None:
        """Handle the driver's events, then do what is due."""
        for event in self._driver.new_events():
            self._handle(event)
        super().turn()

    def restart(self, planned: PlannedProcess) -> RunningProcess:
        """Start a process again, in the same actor."""
        process = super().restart(planned)
        assert isinstance(process, RemoteProcess)
        self._processes[planned.name] = process
        return process

    def lost(self) -> list[str]:
        """Return the processes that had started and whose agents never reported their end."""
        return [
            name
            for name, process in self._processes.items()
            if process.pid is not None and not process.has_reported_end
        ]

    def _bind(self, place: AgentPlace) -> Bind:
        """Return the request for a listening socket, at the address by which Ray's nodes know each other."""
        return Bind(place.planned.job.interface, place.process.host, [])

    def _await_actor(self, planned: PlannedProcess) -> RemoteProcess:
        process = self._processes[planned.name] = RemoteProcess(planned.name, UNPLACED)
        return process

    def _handle(self, event: Event) -> None:
        match event:
            case Connected(dashboard):
                if dashboard:
                    say(f"Ray's dashboard: {dashboard}")
            case Waiting(reason):
                say(reason)
            case Placed(name, host):
                self._processes[name].connect(self._driver.stream(name), host)
            case Lost(name, reason):
                self._cannot_start(self._processes[name], reason)
            case Failed(reason):
                for process in self._processes.values():
                    self._cannot_start(process, reason)

    def _cannot_start(self, process: RemoteProcess, reason: str) -> None:
        """End a process that has no agent. One that has an agent ends when its stream does."""
        if not process.has_connected:
            process.fail(f"cannot start: {reason}")


def say(text: str) -> None:
    """Print a message of the launcher."""
    print(f"echelon: {text}", file=sys.stderr, flush=True)
