"""The progress bar on a terminal, and no bar without one."""

from __future__ import annotations

import contextlib
import io
import logging
import os

import pytest
from rich.console import Console

from echelon.train.loop.reports.reporting import Reporter, TrainingProgress
from echelon.train.recipe.options import TrainOptions

LINE = "INFO:root:Epoch[0] Batch [0-20]\tSpeed: 12.50 samples/sec\taccuracy=0.500000 [not markup]"


def say(terminal: bool) -> str:
    out = io.StringIO()
    show(Console(file=out, force_terminal=terminal, width=100))
    return out.getvalue()


def show(console: Console) -> None:
    with TrainingProgress(console) as progress:
        handler = progress.handler()
        handler.setFormatter(logging.Formatter("%(levelname)s:root:%(message)s"))
        for done in range(1, 4):
            progress.step(0, 2, done, 3)
        message = LINE.removeprefix("INFO:root:")
        handler.emit(logging.makeLogRecord({"msg": message, "levelno": logging.INFO, "levelname": "INFO"}))
        progress.step(1, 2, 1, 3)


def test_on_a_terminal_the_bar_is_below_the_log() -> None:
    text = say(terminal=True)
    assert "epoch 1 of 2" in text
    assert "epoch 2 of 2" in text
    assert "Speed: 12.50 samples/sec" in text


def test_a_validation_has_the_bar_until_the_next_step() -> None:
    out = io.StringIO()
    with TrainingProgress(Console(file=out, force_terminal=True, width=100)) as progress:
        progress.step(0, 2, 3, 3)
        progress.validating(0, 1000)
        progress.validating(500, 1000)
        progress.step(1, 2, 1, 3)
    text = out.getvalue()
    assert text.index("epoch 1 of 2") < text.index("validation")
    assert text.rindex("validation") < text.rindex("epoch 2 of 2")


def test_a_long_validation_is_logged_now_and_then(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    reporter = Reporter(TrainOptions(), None, logs=True, is_first=lambda: True)
    for done in range(0, 5001, 500):  # one batch every four seconds
        reporter.validating(done, 5000)
        now += 4.0
    assert caplog.messages == [f"validated {done} of 5000 samples" for done in (1500, 3000, 4500)]


def test_without_a_terminal_only_the_log_is_printed() -> None:
    assert say(terminal=False) == f"{LINE}\n"


def all_of(screen: io.FileIO) -> bytes:
    """Return all output of a closed terminal; reading its other end finishes with an error."""
    found = b""
    with contextlib.suppress(OSError):
        while part := screen.read(1 << 16):
            found += part
    return found


def test_on_a_terminal_a_log_line_keeps_its_tabs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    master, slave = os.openpty()
    with open(master, "rb", buffering=0) as screen, open(slave, "w") as terminal:
        console = Console(file=terminal, width=60)  # narrower than the line
        assert console.is_terminal
        show(console)
        terminal.close()
        shown = all_of(screen).decode()
    assert f"{LINE}\r\n" in shown
    assert "epoch 2 of 2" in shown
