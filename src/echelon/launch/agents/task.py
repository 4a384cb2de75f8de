"""An agent that another system has started, such as mpirun or srun: it connects to the hub of the launcher.

`python -m echelon.launch.agents.task`. The variables of `Hub.environment` say where the hub is and which task this is.
"""

from __future__ import annotations

import socket
import sys

from echelon.environment import Job, find_own_python, task_from_environment
from echelon.errors import EchelonError, JobError
from echelon.launch.agents.agent import serve
from echelon.launch.agents.channel_stream import ChannelStream
from echelon.transport.admission.admission import connect
from echelon.transport.admission.channel import Channel
from echelon.transport.admission.credentials import Security

CONNECT_S = 20.0


def main() -> int:
    """Serve the launcher, and return 0 however its process ends: mpirun may kill all tasks if one of them fails."""
    find_own_python()
    try:
        address, task = task_from_environment()
        return serve(ChannelStream(_connect(address)), task)
    except EchelonError as error:
        print(f"the agent on {socket.gethostname()} cannot start: {error}", file=sys.stderr, flush=True)
        return 1


def _connect(address: tuple[str, int]) -> Channel:
    try:
        return connect(address, Security.of(Job.from_environment()), CONNECT_S)
    except OSError as error:
        raise JobError(
            f"no connection to the launcher at {address[0]}:{address[1]}: {error}; check the firewall, or name the "
            "interface of the launcher's machine that the hosts reach with -i"
        ) from error


if __name__ == "__main__":
    sys.exit(main())
