"""Errors of a job's processes: the cause is shown first, each error once, and nothing is lost."""

from __future__ import annotations

import pytest

from echelon.launch.supervision.last_lines import HOLD_S, LastLines, advice_for

NO_DATA = "train_mnist.py: error: MNIST: no file train-images-idx3-ubyte"


class Screen:
    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []
        self.output = LastLines(lambda name, text: self.lines.append((name, text)))

    def take(self, *lines: tuple[str, str]) -> None:
        for at, (name, text) in enumerate(lines):
            self.output.take(name, text, float(at) / 1000)


@pytest.fixture
def screen() -> Screen:
    return Screen()


def test_ordinary_lines_are_shown_at_once(screen: Screen) -> None:
    screen.take(("worker 0", "a"), ("worker 1", "b: an error: in the middle"))
    assert screen.lines == [("worker 0", "a"), ("worker 1", "b: an error: in the middle")]


def test_the_cause_is_shown_before_its_consequences(screen: Screen) -> None:
    lost = "error: worker 0: server 0 died"
    screen.take(("worker 0", lost), ("server 0", "Traceback (most recent call last):"), ("server 0", "OSError: why"))
    assert screen.lines == []
    screen.output.release("server 0", is_cause=True)
    screen.output.release("worker 0", is_cause=False)
    assert screen.lines == [
        ("server 0", "Traceback (most recent call last):"),
        ("server 0", "OSError: why"),
        ("worker 0", lost),
    ]


def test_an_error_of_several_processes_is_shown_once(screen: Screen) -> None:
    for name in ("worker 1", "worker 0"):
        screen.take((name, NO_DATA), (name, "  a.bin"))
    screen.take(("worker 0", "  b.bin"), ("server 0", "server stops: worker 1 exited with status 1"))
    screen.output.release("worker 1", is_cause=True)
    screen.output.release("worker 0", is_cause=False)
    screen.output.release("server 0", is_cause=False)
    assert screen.lines == [("worker 1", NO_DATA), ("worker 1", "  a.bin"), ("worker 0", "  b.bin")]
    assert screen.output.ends_with_error("worker 1", "  a.bin")


def test_equal_tracebacks_are_shown_whole(screen: Screen) -> None:
    lines = ["Traceback (most recent call last):", '  File "train.py"', "ValueError"]
    for name in ("worker 0", "worker 1"):
        screen.take(*[(name, text) for text in lines])
        screen.output.release(name, is_cause=name == "worker 0")
    assert screen.lines == [(name, text) for name in ("worker 0", "worker 1") for text in lines]
    assert not screen.output.ends_with_error("worker 0", "ValueError")


def test_a_traceback_that_torch_has_labelled_is_held_like_any_other(screen: Screen) -> None:
    screen.take(("worker 0", "[rank0]: Traceback (most recent call last):"), ("worker 0", "[rank0]: ValueError"))
    assert screen.lines == []
    screen.output.release("worker 0", is_cause=True)
    assert [text for _, text in screen.lines][-1] == "[rank0]: ValueError"


@pytest.mark.parametrize(
    "last", ["KeyError: 'WORLD_SIZE'", "ValueError: Error initializing torch.distributed using env:// rendezvous: …"]
)
def test_a_program_for_torchrun_is_advised(last: str) -> None:
    assert "start it with torchrun" in advice_for(["Traceback (most recent call last):", last])
    assert advice_for(["KeyError: 'rank'"]) == ""


def test_the_last_lines_are_repeated_after_other_output(screen: Screen) -> None:
    screen.take(("worker 1", NO_DATA))
    screen.output.release("worker 1", is_cause=True)
    assert screen.output.ends_with_error("worker 1", NO_DATA)
    screen.take(("worker 0", "Epoch[0] Train-accuracy=0.9"))
    assert not screen.output.ends_with_error("worker 1", NO_DATA)


def test_a_process_that_continues_after_an_error_is_not_held_back(screen: Screen) -> None:
    screen.take(("worker 0", "error: a warning after all"), ("worker 0", "more"))
    screen.output.release_overdue(HOLD_S / 2)
    assert screen.lines == []
    screen.output.release_overdue(HOLD_S + 1)
    screen.take(("worker 0", "next"))
    assert [text for _, text in screen.lines] == ["error: a warning after all", "more", "next"]


def test_an_end_waits_for_a_running_process_that_failed_earlier(screen: Screen) -> None:
    screen.take(("worker 1", "error: the cause"), ("worker 0", "error: the consequence"))
    wait = screen.output.waits_for_cause
    assert wait("worker 0", ["worker 1"], 0.5)
    assert not wait("worker 1", ["worker 0"], 0.5), "it was the first"
    assert not wait("worker 0", [], 0.5), "the cause has ended"
    assert not wait("worker 0", ["worker 1"], HOLD_S + 1), "not forever"
    assert not wait("worker 2", ["worker 1"], 0.5), "it printed no error: it was killed"
