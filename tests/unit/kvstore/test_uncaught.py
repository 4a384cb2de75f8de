"""An uncaught JobError is one line with the place in the user's program. Other errors keep their traceback."""

from __future__ import annotations

import sys

import pytest

from echelon.errors import JobError, UsageError
from echelon.kvstore.uncaught import print_job_errors_in_one_line


def printed(error: Exception, capsys: pytest.CaptureFixture[str]) -> str:
    """Return what the interpreter prints if nobody catches the error."""
    try:
        raise error
    except Exception as raised:
        sys.excepthook(type(raised), raised, raised.__traceback__)
    return capsys.readouterr().err


def test_only_a_job_error_loses_its_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    print_job_errors_in_one_line()
    changed = sys.excepthook
    print_job_errors_in_one_line()
    assert sys.excepthook is changed, "a second store changes nothing"
    line = printed(JobError("worker 0: worker 1 died"), capsys)
    assert line.startswith(f"error: worker 0: worker 1 died ({__file__}, line ")
    assert line.count("\n") == 1
    assert printed(UsageError("a wrong name"), capsys).startswith("Traceback (most recent call last):\n")
