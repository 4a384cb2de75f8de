"""What a run does, in a word: from before its first event until after its end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_state import begin, event, progress, taken

from echelon.report.follow import RunFiles
from echelon.report.state.run import RunState
from echelon.report.terminal.status import Status, run_status

TRAINED = (begin(0), progress(0, 1001.0, 3))


def status(state: RunState, now: float = 1001.0, **files: Any) -> Status:
    return run_status(state, RunFiles(Path("run"), **{"last_event": 1001.0} | files), now)


def test_the_stages_of_a_run() -> None:
    assert status(RunState(), last_event=None).word == "waiting"
    job = event("job", num_workers=2, num_servers=1)
    starting = status(taken(job))
    assert starting == ("starting", "busy", "starting 4 processes")
    assert starting.is_live
    assert status(taken(job, *TRAINED)).word == "training"
    settings, done = event("settings"), progress(0, 1009.0, 40, "done", seconds=9.0)
    finishing = taken(job, settings, *TRAINED, done)
    assert status(finishing, 1009.0, last_event=1009.0).word == "finishing", "the final weights are being measured"
    assert status(finishing, exit_status=0).word == "finished"
    other_program = taken(job, *TRAINED, done)
    assert status(other_program, 2000.0).word == "finished", "it writes no summary"


def test_events_before_the_job_is_known() -> None:
    assert status(taken(event("loading", rank=0))).word == "starting"
    assert status(taken(event("warning", text="x"))) == ("starting", "busy", "")


@pytest.mark.parametrize(
    ("exit_status", "expected"),
    [
        (0, ("finished", "done", "")),
        (1, ("failed", "bad", "The run failed with exit status 1.")),
        (130, ("stopped", "warn", "SIGINT stopped the run.")),
        (143, ("stopped", "warn", "SIGTERM stopped the run.")),
        (137, ("failed", "bad", "The run failed with exit status 137: SIGKILL ended one of its processes.")),
        (255, ("failed", "bad", "The run failed with exit status 255.")),
    ],
)
def test_the_end(exit_status: int, expected: tuple[str, str, str]) -> None:
    shown = status(taken(*TRAINED), exit_status=exit_status)
    assert shown == expected
    assert shown.has_ended
    assert not shown.is_live


def test_a_job_that_vanished_is_silent() -> None:
    shown = status(taken(*TRAINED), 1043.0)
    assert shown == ("silent", "warn", "No event for 0:42. The job may have ended without a last event.")
    assert not shown.has_ended, "it may be stopped by a debugger, and go on"


def test_a_deleted_run() -> None:
    assert status(taken(*TRAINED), exists=False).word == "deleted"


def test_a_log_that_is_being_read() -> None:
    shown = status(taken(*TRAINED), read_bytes=10 << 20, total_bytes=40 << 20)
    assert shown.message == "Reading the log of the run: 25%."
