"""The number of usable cores, with cgroup files in a temporary folder, and Ctrl-C while modules are imported."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from echelon.system import exit_on_interrupt, usable_cores


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 8),
        ({"cpu.max": "max 100000\n"}, 8),
        ({"cpu.max": "250000 100000\n"}, 2),
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu.max": "1600000 100000\n"}, 8),
        ({"cpu.max": "what is this?\n"}, 8),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 8),
        ({"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 3),
    ],
)
def test_a_quota_limits_eight_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], expected: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    (tmp_path / "cpu").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert usable_cores(tmp_path) == expected


def test_cores_of_this_machine() -> None:
    assert 1 <= usable_cores() <= len(os.sched_getaffinity(0))


INTERRUPTED = """
import os, signal
from echelon.system import exit_on_interrupt
signal.signal(signal.SIGINT, signal.default_int_handler)
try:
    with exit_on_interrupt():
        {inside}
    os.kill(os.getpid(), signal.SIGINT)
except KeyboardInterrupt:
    print("raised")
finally:
    print("cleaned up")
"""


@pytest.mark.parametrize(
    ("inside", "status", "out", "err"),
    [
        ("os.kill(os.getpid(), signal.SIGINT)", 130, "", "stopped by SIGINT\n"),
        ("pass", 0, "raised\ncleaned up\n", ""),
    ],
)
def test_an_interrupt_inside_the_block_ends_the_process_with_a_line(
    inside: str, status: int, out: str, err: str
) -> None:
    command = [sys.executable, "-c", INTERRUPTED.format(inside=inside)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (status, out, err)


def test_a_handler_of_the_program_stays() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with exit_on_interrupt():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
