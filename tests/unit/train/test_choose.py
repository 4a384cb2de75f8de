"""The choice of the engine, and the log lines of a long operation."""

from __future__ import annotations

import logging

import pytest

from echelon.train.step import choose
from echelon.train.step.choose import COMPILING_PAYS_AFTER, decide_engine, log_duration

MANY, FEW = COMPILING_PAYS_AFTER, COMPILING_PAYS_AFTER - 1


@pytest.mark.parametrize(
    ("requested", "device", "obstacle", "steps", "name", "captured"),
    [
        ("auto", "cpu", None, MANY, "eager", False),
        ("auto", "cuda", None, MANY, "graph", True),
        ("auto", "cuda", None, FEW, "graph", True),
        ("auto", "cuda", "servers", MANY, "compile", False),
        ("auto", "cuda", "servers", FEW, "eager", False),
        ("eager", "cuda", None, MANY, "eager", False),
        ("graph", "cuda", None, MANY, "graph", True),
        ("graph", "cuda", "servers", MANY, "eager", False),
        ("graph", "cpu", None, MANY, "eager", False),
        ("compile", "cuda", None, FEW, "compile", True),
        ("compile", "cpu", None, FEW, "compile", False),
    ],
)
def test_the_engine(requested: str, device: str, obstacle: str | None, steps: int, name: str, captured: bool) -> None:
    choice = decide_engine(requested, device, obstacle, steps)
    assert (choice.name, choice.captured) == (name, captured)
    assert choice.compiles_beside == (requested == "auto" and captured), "captured at once, compiled beside"
    if requested == "graph" and not captured:
        assert ("servers" if device == "cuda" else "the CPU") in choice.reason, "a fallback names its reason"


def test_a_long_operation_is_logged_until_it_ends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(choose, "REMIND_S", 0.001)
    with caplog.at_level(logging.INFO, choose.__name__), log_duration("compiling the step"):
        while not any(message.startswith("still") for message in caplog.messages):
            pass
    assert caplog.messages[0] == "compiling the step …"
    assert caplog.messages[1] == "still compiling the step, 0 s"
    assert caplog.messages[-1] == "compiling the step took 0 s"
