"""What a run does, in a word and a sentence. Whoever watches a run shows it: `echelon top` and the live page."""

from __future__ import annotations

from typing import NamedTuple

from echelon.report.follow import PIECE_BYTES, RunFiles
from echelon.report.state.job import job_info_of
from echelon.report.state.run import RunState
from echelon.report.state.worker import FINISHED, STOPPED, TRAINING
from echelon.report.summary import exit_words
from echelon.report.terminal import lines

SILENT_S = 15.0  # workers and servers report every second
FINISHING = "finishing"
LIVE = (lines.STARTING, TRAINING, FINISHING)  # the states of a run that goes on
ENDED = (FINISHED, STOPPED, "failed", "deleted")

# How something is, for its colour. The text beside it says the same.
GOOD, BUSY, WARN, BAD, DONE = "good", "busy", "warn", "bad", "done"


class Status(NamedTuple):
    """A word, its tone, and a sentence where the word is not enough."""

    word: str
    tone: str
    message: str = ""

    @property
    def is_live(self) -> bool:
        """Whether the processes of the run work."""
        return self.word in LIVE

    @property
    def has_ended(self) -> bool:
        """Whether nothing more is expected of the run."""
        return self.word in ENDED


def run_status(state: RunState, files: RunFiles, now: float) -> Status:
    """Return what a run does at the time `now`."""
    if not files.exists:
        return Status("deleted", BAD, "The folder of this run was deleted. This is the last state that was read.")
    if files.last_event is None:
        return Status("waiting", BUSY, "The job has not written any event yet.")
    if files.total_bytes - files.read_bytes > PIECE_BYTES:
        return Status("reading", BUSY, f"Reading the log of the run: {files.fraction_read:.0%}.")
    if files.exit_status is not None:
        return _end(files.exit_status)
    silent_s = now - files.last_event
    if state.has_trained and not state.active and (state.settings is None or state.final is not None):
        return Status(FINISHED, DONE)  # `echelon train` writes a summary; other programs do not
    if silent_s > SILENT_S:
        message = f"No event for {lines.duration(silent_s)}. The job may have ended without a last event."
        return Status("silent", WARN, message)
    if state.has_trained:
        return Status(TRAINING, GOOD) if state.active else Status(FINISHING, BUSY)
    info = job_info_of(state)
    return Status(lines.STARTING, BUSY, lines.phase_of_start(info, state) if info.num_workers else "")


def _end(exit_status: int) -> Status:
    word, name = exit_words(exit_status)
    if word == FINISHED:
        return Status(FINISHED, DONE)
    if word == STOPPED:
        return Status(STOPPED, WARN, f"{name} stopped the run.")
    why = f": {name} ended one of its processes" if name else ""
    return Status("failed", BAD, f"The run failed with exit status {exit_status}{why}.")
