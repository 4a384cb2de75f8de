"""The moving line on a terminal, and its absence elsewhere."""

from __future__ import annotations

import io
import logging

from rich.console import Console

from echelon.train.progress import TrainingProgress


def say(terminal: bool) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=100)
    with TrainingProgress(console) as progress:
        handler = progress.handler()
        handler.setFormatter(logging.Formatter("%(levelname)s:root:%(message)s"))
        for done in range(1, 4):
            progress.step(0, 2, done, 3)
        message = "Epoch[0] Batch [0-20]\tSpeed: 12.50 samples/sec\taccuracy=0.500000 [not markup]"
        handler.emit(logging.makeLogRecord({"msg": message, "levelno": logging.INFO, "levelname": "INFO"}))
        progress.step(1, 2, 1, 3)
    return out.getvalue()


def test_on_a_terminal_epochs_move_under_the_log() -> None:
    text = say(terminal=True)
    assert "epoch 1 of 2" in text
    assert "epoch 2 of 2" in text
    assert "Speed: 12.50 samples/sec" in text


def test_elsewhere_the_log_is_all_there_is_to_the_byte() -> None:
    line = "INFO:root:Epoch[0] Batch [0-20]\tSpeed: 12.50 samples/sec\taccuracy=0.500000 [not markup]\n"
    assert say(terminal=False) == line
