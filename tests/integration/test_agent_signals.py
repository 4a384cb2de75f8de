"""The signals of a process that an agent starts do not depend on what started the agent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import IO

from echelon.launch.agents.messages import Ended, FromAgent, Output, Start, decode_from_agent, encode
from echelon.transport.framing import FrameReader

PROGRAM = """
import signal
print(signal.getsignal(signal.SIGINT) is signal.default_int_handler, signal.pthread_sigmask(signal.SIG_BLOCK, []))
"""


def ignore_and_block_ctrl_c() -> None:
    """Do what a shell does for a job in the background, and what Ray does for everything that it starts."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})


def _until_its_process_ended(stream: IO[bytes]) -> Iterator[FromAgent]:
    reader = FrameReader(decode_from_agent)
    while data := os.read(stream.fileno(), 1 << 16):
        for message in reader.feed(data):
            yield message
            if isinstance(message, Ended):
                return


def test_a_process_gets_ctrl_c_even_if_its_agent_was_started_without() -> None:
    agent = subprocess.Popen(
        [sys.executable, "-m", "echelon.launch.agents.agent"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        preexec_fn=ignore_and_block_ctrl_c,
    )
    environment = {"DMLC_ROLE": "server"}
    start = Start("server 0", [sys.executable, "-c", PROGRAM], environment, folder=None, local_workers=1)
    assert agent.stdin is not None
    assert agent.stdout is not None
    with agent, agent.stdin, agent.stdout:
        agent.stdin.write(encode(start))
        agent.stdin.flush()
        messages = list(_until_its_process_ended(agent.stdout))
        agent.stdin.close()
    assert b"".join(one.data for one in messages if isinstance(one, Output)) == b"True set()\n", messages
