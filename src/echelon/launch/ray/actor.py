"""The Ray actor of one process of a job. It runs an agent on the node where Ray has placed it, and passes on its bytes.

What the process prints is also printed here, so that Ray's dashboard shows it as the actor's log.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from echelon.environment import child_environment, variable
from echelon.errors import JobError
from echelon.launch.agents.messages import Ended, Output, Started, decode_from_agent
from echelon.launch.supervision.processes import READ_BYTES, how_ended
from echelon.transport.framing import FrameReader

_PYTHONS = str(Path(sys.executable).parent)  # where a process finds the Python that runs Ray, as `python`


class AgentActor:
    """An agent as an actor. `read` waits for bytes, so Ray must run it beside `write` (`max_concurrency=2`)."""

    def __init__(self, name: str) -> None:
        """Start the agent. It ends, and kills its process, when this actor's process ends for any reason."""
        self._name = name
        self._reader = FrameReader(decode_from_agent)
        self._agent = subprocess.Popen(
            [sys.executable, "-m", "echelon.launch.agents.agent"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            env=child_environment({"PATH": os.pathsep.join(filter(None, [_PYTHONS, variable("PATH")]))}),
        )

    def __repr__(self) -> str:
        """Return what Ray shows as the actor's name."""
        return self._name

    def address(self) -> str:
        """Return the address of this actor's node, as the other nodes know it."""
        from ray.util import get_node_ip_address

        return str(get_node_ip_address())

    def read(self) -> bytes:
        """Wait for bytes of the agent and return them, or b"" if it has ended."""
        assert self._agent.stdout is not None
        data = os.read(self._agent.stdout.fileno(), READ_BYTES)
        self._log(data)
        return data

    def write(self, data: bytes) -> None:
        """Pass bytes to the agent. If it has ended, `read` says so."""
        assert self._agent.stdin is not None
        try:
            while data:
                data = data[self._agent.stdin.write(data) :]
        except BrokenPipeError:
            pass

    def _log(self, data: bytes) -> None:
        try:
            for message in self._reader.feed(data):
                match message:
                    case Output(text):
                        print(text.decode(errors="replace"), end="", flush=True)
                    case Started(pid):
                        print(f"{self._name} runs as process {pid}", flush=True)
                    case Ended(code):
                        print(f"{self._name} {how_ended(code)}", flush=True)
        except JobError as error:  # the launcher gets the same bytes, and reports it
            print(error, flush=True)
