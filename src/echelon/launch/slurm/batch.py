"""Batch jobs: submitting one, and following it to its end.

While a job is followed, it ends with the process that submitted it: on Ctrl-C, on SIGTERM, and also if that process is
killed. A detached job continues.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from echelon.environment import SLURM_REQUEST
from echelon.errors import JobError
from echelon.launch.interface import Output
from echelon.launch.slurm.commands import run_command
from echelon.launch.slurm.script import BatchState, output_file, parse_state
from echelon.launch.supervision.signals import collected_signals

POLL_S = 2.0  # between two questions to slurmctld, which all users share
READ_S = 0.2
_LABELLED = re.compile(r"\[((?:worker|server|scheduler|srun) ?\d*)\] (.*)", re.DOTALL)
_NOT_FOUND = "Invalid job id"
_ENDED_BY_SLURM = {
    "CANCELLED": "was cancelled",
    "TIMEOUT": "reached its time limit; give more with --slurm-time, or continue with --slurm-requeue",
    "OUT_OF_MEMORY": "needed more memory than requested; request more with --slurm-args=--mem-per-cpu=SIZE",
    "NODE_FAIL": "lost a node",
    "PREEMPTED": "was preempted; let it continue later with --slurm-requeue",
    "DEADLINE": "reached its deadline",
}


def submit(command: Sequence[str], request_text: str) -> str:
    """Submit a batch job with a request for the launcher in it, and return its number."""
    answer = run_command(command, variables={SLURM_REQUEST: request_text})
    return answer.strip().partition(";")[0]  # the name of the cluster may follow


def follow(job_id: str, folder: str, output: Output) -> int:
    """Show the output of a batch job until it has ended, and return its exit status."""
    lines = _Lines(output_file(folder, job_id), output)
    with _cancelled_at_end(job_id), collected_signals() as signals:
        follower = _Follower(job_id, signals)
        while not follower.state.has_ended:
            lines.show_new()
            follower.turn()
            output.on_tick()
            time.sleep(READ_S)
        lines.show_new(final=True)
    return follower.status()


class _Follower:
    """Asks Slurm for the state of a job, and cancels it on signals."""

    def __init__(self, job_id: str, signals: deque[int]) -> None:
        self.state = BatchState("PENDING", "None", 0, 0)
        self._job_id, self._signals = job_id, signals
        self._stopped_by: int | None = None
        self._asked = -POLL_S
        self._shown = ""

    def turn(self) -> None:
        while self._signals:
            self._stop(self._signals.popleft())
        if time.monotonic() - self._asked >= POLL_S:
            self._asked = time.monotonic()
            self._ask()

    def status(self) -> int:
        """Return the exit status of the ended job, after saying why Slurm has ended it."""
        if self._stopped_by is not None:
            return 128 + self._stopped_by
        if why := _ENDED_BY_SLURM.get(self.state.name):
            _say(f"Slurm job {self._job_id} {why}")
        return self.state.status

    def _ask(self) -> None:
        try:
            self.state = parse_state(run_command(["scontrol", "--oneliner", "show", "job", self._job_id]))
        except JobError as error:
            if _NOT_FOUND in str(error):
                raise JobError(f"Slurm does not know job {self._job_id} any more; how it ended is unknown") from error
            self._show(f"the state of Slurm job {self._job_id} is unknown at the moment: {error}")
            return
        waits = self.state.name == "PENDING" and self.state.reason != "None"
        if waits:
            self._show(f"Slurm job {self._job_id} waits: {self.state.reason}")

    def _show(self, text: str) -> None:
        if text != self._shown:
            self._shown = text
            _say(text)

    def _stop(self, number: int) -> None:
        """Send the signal to the launcher in the batch job, whose workers get time to save. A second one kills them."""
        name = signal.Signals(number).name
        if self._stopped_by is None:
            self._stopped_by = number
            _say(f"stopped by {name}; Slurm job {self._job_id} gets it, too")
            self._ask()
            _cancel(self._job_id, *(["--batch", f"--signal={name}"] if self.state.name == "RUNNING" else []))
        else:
            _cancel(self._job_id, "--full", "--signal=KILL")
            _cancel(self._job_id)


class _Lines:
    """The lines of a growing file. Those of processes go to the output with their names."""

    def __init__(self, path: Path, output: Output) -> None:
        self._path, self._output = path, output
        self._file: IO[bytes] | None = None
        self._partial = b""

    def show_new(self, *, final: bool = False) -> None:
        if self._file is None:
            try:
                self._file = self._path.open("rb")
            except FileNotFoundError:
                if final:
                    _say(f"the output of the job is not visible here: there is no file {self._path}")
                return
        *whole, self._partial = (self._partial + self._file.read()).split(b"\n")
        if final:
            self._file.close()
            whole += [self._partial] if self._partial else []
        for raw in whole:
            self._show(raw.decode(errors="replace"))

    def _show(self, text: str) -> None:
        if found := _LABELLED.fullmatch(text):
            self._output.on_line(found[1], found[2])
        else:
            print(text, file=sys.stderr, flush=True)


@contextmanager
def _cancelled_at_end(job_id: str) -> Iterator[None]:
    """Cancel a job if this process dies or the block raises. A shell waits for that, because SIGKILL runs no code."""
    script = 'read -r done || exec scancel "$1"'
    command = ["sh", "-c", script, "sh", job_id]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as watcher:
        yield
        assert watcher.stdin is not None
        watcher.stdin.write(b"done\n")


def _cancel(job_id: str, *options: str) -> None:
    try:
        run_command(["scancel", *options, job_id])
    except JobError as error:
        _say(f"Slurm job {job_id} could not be cancelled: {error}; try again with: scancel {job_id}")


def _say(text: str) -> None:
    print(f"echelon: {text}", file=sys.stderr, flush=True)
