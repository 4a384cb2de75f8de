"""An uncaught JobError is one line with the place in the user's program. Other errors keep their traceback."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable, Iterator

import pytest

from echelon.errors import JobError, JoinRefused, UsageError
from echelon.kvstore.create import _call_at_exit
from echelon.kvstore.uncaught import PRINTED, print_job_errors_in_one_line


@pytest.fixture(autouse=True)
def _nothing_printed() -> Iterator[None]:
    yield
    PRINTED.clear()


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


@pytest.mark.parametrize("error", [UsageError("another batch size"), JoinRefused("all workers have registered")])
def test_a_worker_that_a_running_job_refuses_ends_with_one_line_and_status_2(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    print_job_errors_in_one_line(joins=True)
    with pytest.raises(SystemExit) as ended:
        printed(error, capsys)
    assert ended.value.code == 2
    line = capsys.readouterr().err
    assert line.startswith(f"error: {error} ({__file__}, line ")
    assert line.count("\n") == 1


def test_an_error_that_was_printed_is_not_printed_again_at_exit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    registered: list[Callable[[], None]] = []
    monkeypatch.setattr(atexit, "register", registered.append)
    error = JobError("worker 0: the job is broken")

    def end(failed: bool) -> None:
        raise error

    _call_at_exit(end)
    registered[0]()
    assert capsys.readouterr().err == "error: worker 0: the job is broken\n"
    printed(error, capsys)
    registered[0]()
    assert capsys.readouterr().err == ""
