"""The output of a process behind an agent: all of it arrives, and a flood of it does not delay Ctrl-C."""

from __future__ import annotations

import os
import signal
import sys
import time

import pytest
from agents import PipeLauncher

from echelon.environment import Job
from echelon.launch.interface import Launcher, Output
from echelon.launch.local.launcher import LocalLauncher
from echelon.launch.plan import Request

LINES = 20_000  # more bytes than pipes hold
BUSY_S = 3.0  # of a launcher whose terminal is slow
MANY = f"for i in range({LINES}): print(i, 'x' * 60)"
FLOOD = """
try:
    while True:
        print("x" * 100)
except KeyboardInterrupt:
    print("interrupted")
    raise SystemExit(3)
"""


def run(launcher: Launcher, program: str, output: Output) -> int:
    request = Request(Job(num_workers=1), [sys.executable, "-c", program])
    return launcher.run(launcher.plan(request), output)


def test_all_lines_of_a_process_arrive_at_a_launcher_that_is_slow() -> None:
    numbers: list[str] = []

    def on_line(name: str, text: str) -> None:
        if not numbers:
            time.sleep(BUSY_S)
        numbers.append(text.partition(" ")[0])

    assert run(PipeLauncher(), MANY, Output(on_line)) == 0
    assert numbers == [str(number) for number in range(LINES)]


@pytest.mark.parametrize("launcher", [LocalLauncher(), PipeLauncher()], ids=lambda launcher: launcher.name)
def test_ctrl_c_ends_a_process_that_prints_without_end(launcher: Launcher) -> None:
    count, last = 0, ""

    def on_line(name: str, text: str) -> None:
        nonlocal count, last
        count, last = count + 1, text
        if count == 10_000:
            os.kill(os.getpid(), signal.SIGINT)

    assert run(launcher, FLOOD, Output(on_line)) == 130
    assert last.endswith("interrupted")
    assert count < 1_000_000
