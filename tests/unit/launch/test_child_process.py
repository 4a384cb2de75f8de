"""Child processes of a launcher."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from echelon.launch.supervision.processes import ChildProcess
from jobs import until

WAITS = [sys.executable, "-c", "import signal; print('waits', flush=True); signal.pause()"]


@contextmanager
def waiting_child(*, shielded: bool) -> Iterator[ChildProcess]:
    child = ChildProcess("server 0", WAITS, {}, shielded=shielded)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"waits\n"
        yield child
    finally:
        child.close()


def test_a_shielded_process_is_ended_only_by_its_launcher() -> None:
    """Slurm sends SIGTERM to every process of a job at once, but servers must run until the workers have saved."""
    with waiting_child(shielded=True) as child:
        os.kill(child.pid, signal.SIGTERM)
        os.kill(child.pid, signal.SIGTERM)
        assert child.exit_code() is None
        child.send_signal(signal.SIGTERM)
        until(lambda: child.exit_code() is not None, "the end of the process")


def test_another_process_ends_on_sigterm() -> None:
    with waiting_child(shielded=False) as child:
        os.kill(child.pid, signal.SIGTERM)
        until(lambda: child.exit_code() is not None, "the end of the process")
        assert child.how_ended() == "was killed by signal 15"
