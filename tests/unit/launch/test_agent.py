"""An agent whose process ends while its output waits to be sent."""

from __future__ import annotations

import os
import select
import sys
from pathlib import Path

from echelon.launch.agents.agent import Agent
from echelon.launch.agents.messages import Ended, Output, Start, decode_from_agent
from echelon.launch.agents.streams import PipeStream
from echelon.transport.framing import FrameReader


def test_the_end_of_a_process_is_handled_before_its_output_in_the_same_turn(tmp_path: Path) -> None:
    """The selector returns both in any order. An agent that failed then lost the output that it had not sent."""
    to_agent, from_agent = os.pipe(), os.pipe()
    agent = Agent(PipeStream(to_agent[0], from_agent[1]), tmp_path)
    arguments = [sys.executable, "-c", "print('last words')"]
    agent._handle(Start("worker 0", arguments, {"DMLC_ROLE": "worker"}, None, local_workers=1))
    process = agent._process
    assert process is not None
    select.select([process.pidfd], [], [], 60.0)
    agent._handle_end()
    agent._read_output()
    reader = FrameReader(decode_from_agent)
    messages = list(reader.feed(os.read(from_agent[0], 1 << 16)))
    assert b"".join(message.data for message in messages if isinstance(message, Output)) == b"last words\n"
    assert messages[-1] == Ended(0)
    for fd in (*to_agent, *from_agent):
        os.close(fd)
