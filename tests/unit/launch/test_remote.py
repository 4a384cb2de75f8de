"""The launcher's side of a process on another host."""

from __future__ import annotations

import os

from echelon.launch.agents.remote import RemoteProcess
from echelon.launch.agents.streams import PipeStream


def test_text_of_a_login_script_is_recognised_and_shown() -> None:
    reading, script = os.pipe()
    ignored, writing = os.pipe()
    stream = PipeStream(reading, writing)
    try:
        process = RemoteProcess("worker 0", "h1", stream)
        os.write(script, b"Welcome to h1. Today is a good day.\n")
        assert process.read_output() == b""
        assert process.how_ended() == (
            "cannot run on h1: these bytes are not a message: 'Welcome to h1. Today is a good day.\\n' would begin one "
            "of 1466264675 bytes, and at most 16777216 are allowed; does a login script of that host print something?"
        )
    finally:
        for file in (reading, script, ignored, writing):
            os.close(file)
