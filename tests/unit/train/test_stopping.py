"""Signals: recorded, raised at once where there is nothing to save, and reported instead of the errors they cause."""

from __future__ import annotations

import os
import signal

import pytest

from echelon.train.loop.stopping import EXIT_STATUS, Interrupted, StopSignals

BOTH = pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])


@BOTH
def test_a_signal_is_recorded_and_the_handlers_are_restored(number: signal.Signals) -> None:
    stopping, before = StopSignals(), signal.getsignal(number)
    with stopping.recorded(), stopping.instead_of_errors():
        os.kill(os.getpid(), number)
    assert stopping.requested == number.name
    assert EXIT_STATUS[number.name] == 128 + number
    assert signal.getsignal(number) is before


@BOTH
def test_a_signal_while_compiling_passes_handlers_of_exceptions(number: signal.Signals) -> None:
    stopping = StopSignals()

    def compile_something() -> None:
        try:
            os.kill(os.getpid(), number)
        except Exception:  # like a compiler around an optional attempt
            pass

    with stopping.recorded(), pytest.raises(Interrupted, match=number.name), stopping.at_once():
        compile_something()


def test_a_signal_before_work_that_can_be_left_at_once_ends_it_at_its_start() -> None:
    stopping = StopSignals()
    with stopping.recorded():
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(Interrupted, match="SIGTERM"), stopping.at_once():
            raise AssertionError("the work began")
        os.kill(os.getpid(), signal.SIGTERM)  # recorded only: the work was left


def test_a_second_ctrl_c_raises_at_once_and_a_second_sigterm_does_not() -> None:
    stopping = StopSignals()
    with stopping.recorded():
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_errors_become_interrupted_only_after_a_signal() -> None:
    stopping = StopSignals()
    with pytest.raises(ZeroDivisionError), stopping.instead_of_errors():
        raise ZeroDivisionError
    stopping.requested = "SIGTERM"
    with pytest.raises(Interrupted, match="SIGTERM") as caught, stopping.instead_of_errors():
        raise ZeroDivisionError
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
