"""Schedules: MXNet's rate at every update, also if the training is stopped and resumed."""

from __future__ import annotations

import math
import re
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.errors import UsageError
from echelon.train.recipe.schedules import KINDS, Schedule, make_schedule


def schedule(**flags: Any) -> Schedule:
    """Make a schedule with steps at epochs 30 and 60, each of ten updates, unless given otherwise."""
    usual: dict[str, Any] = {"lr": 0.1, "factor": 0.1, "step_epochs": "30,60", "epoch_size": 10, "num_epochs": 80}
    return make_schedule(**(usual | flags))


# --- the values that MXNet's own tests assert


@pytest.mark.parametrize(("update", "rate"), [(0, 0.1), (21, 1.0), (101, 0.1), (201, 0.01), (1000, 1e-4)])
def test_a_factor_every_hundred_updates(update: int, rate: float) -> None:
    """MXNet's FactorScheduler(100, .1), which stops at 1e-4, after a constant warm-up of 20, written as steps."""
    made = schedule(
        lr=1.0,
        step_epochs="1,2,3,4",
        epoch_size=100,
        warmup_epochs=0.2,
        warmup_strategy="constant",
        warmup_begin_lr=0.1,
    )
    assert made.rate(update) == pytest.approx(rate)


@pytest.mark.parametrize(("update", "rate"), [(0, 0.05), (5, 0.075), (15, 0.1), (16, 0.01), (26, 0.001)])
def test_steps_after_a_linear_warm_up(update: int, rate: float) -> None:
    made = schedule(step_epochs="1.5,2.5", warmup_epochs=1, warmup_begin_lr=0.05)
    assert made.rate(update) == pytest.approx(rate)


@pytest.mark.parametrize(("update", "rate"), [(50, 1.5), (100, 3.0), (1000, 0.0)])
def test_poly_after_a_warm_up(update: int, rate: float) -> None:
    made = schedule(lr=3.0, step_epochs="pow2", epoch_size=100, num_epochs=10, warmup_epochs=1)
    assert made.rate(update) == pytest.approx(rate)


@pytest.mark.parametrize(("update", "rate"), [(0, 3.0), (500, 1.55), (1000, 0.1), (1001, 0.1)])
def test_cosine(update: int, rate: float) -> None:
    assert schedule(lr=3.0, kind="cosine", num_epochs=100, final_lr=0.1).rate(update) == pytest.approx(rate)


# --- steps


def test_the_update_after_the_step_is_the_first_at_the_lower_rate() -> None:
    made = schedule()
    assert [made.rate(update) for update in (1, 300, 301, 600, 601, 10**9)] == pytest.approx(
        [0.1, 0.1, 0.01, 0.01, 0.001, 0.001]
    )


def test_rates_round_as_repeated_multiplication_does() -> None:
    lr, made = 0.05, schedule(lr=0.05, step_epochs="1,2,3,4,5,6,7", factor=0.94)
    for epoch in range(8):
        assert made.rate(epoch * 10 + 1) == lr
        lr *= 0.94


@pytest.mark.parametrize("flags", [{"factor": 1.0}, {"factor": 2.0}, {"step_epochs": ""}, {"kind": "constant"}])
def test_constant(flags: dict[str, Any]) -> None:
    made = schedule(**flags)
    assert {made.rate(update) for update in range(1, 1000)} == {0.1}
    assert not any(made.changes(update) for update in range(1, 1000))


def test_steps_at_fractions_of_an_epoch() -> None:
    made = schedule(step_epochs=".5, 1.25")
    assert [made.rate(update) for update in (5, 6, 12, 13)] == pytest.approx([0.1, 0.01, 0.01, 0.001])


@pytest.mark.parametrize("text", ["pow2", "pow-2", "pow 2", "pow - 2.0"])
def test_every_spelling_of_a_power(text: str) -> None:
    made = schedule(step_epochs=text, num_epochs=100)
    assert made.rate(500) == pytest.approx(0.1 * 0.25)
    assert made.rate(1) == pytest.approx(0.1 * 0.999**2)


def test_poly_by_name_and_by_power() -> None:
    assert schedule(kind="poly", num_epochs=100).rate(500) == pytest.approx(0.1 * 0.25)  # 30,60 does not apply to it
    assert schedule(kind="poly", step_epochs="pow3", factor=1.0, num_epochs=100).rate(500) == pytest.approx(0.1 * 0.125)
    assert (
        schedule(step_epochs="pow2", factor=1.0, num_epochs=100).rate(500) == 0.1
    )  # as in MXNet, a factor of 1 disables the steps


# --- warm-up


@pytest.mark.parametrize(
    ("strategy", "quarter", "last"),
    [("linear", 0.325, 0.991), ("constant", 0.1, 0.1), ("power2", 0.15625, 0.98209), ("sqrt", 0.55, 0.9954887)],
)
def test_warm_up_by_strategy(strategy: str, quarter: float, last: float) -> None:
    made = schedule(lr=1.0, epoch_size=100, warmup_epochs=1, warmup_strategy=strategy, warmup_begin_lr=0.1)
    assert made.rate(25) == pytest.approx(quarter)
    assert made.rate(99) == pytest.approx(last)
    assert made.rate(100) == 1.0


def test_a_step_inside_the_warm_up_waits_for_its_end() -> None:
    made = schedule(step_epochs="1,3", warmup_epochs=2)
    assert [made.rate(update) for update in (15, 19, 20, 30, 31)] == pytest.approx([0.075, 0.095, 0.01, 0.01, 0.001])
    assert [update for update in range(1, 50) if made.changes(update)] == [20, 31]
    assert made.adjustment(1) is None  # no step yet


def test_a_run_shorter_than_its_warm_up() -> None:
    made = schedule(kind="cosine", num_epochs=1, warmup_epochs=5)
    assert made.rate(10) == pytest.approx(0.02)


# --- log lines


def test_the_lines_are_mxnets() -> None:
    made = schedule(lr=0.05)
    assert [line for update in range(1, 800) if (line := made.changes(update))] == [
        "Update[301]: Change learning rate to 5.00000e-03",
        "Update[601]: Change learning rate to 5.00000e-04",
    ]
    assert [made.adjustment(epoch) for epoch in (0, 29)] == [None, None]
    assert made.adjustment(30) == "Adjust learning rate to 5.000000e-03 for epoch 30"
    assert made.adjustment(79) == "Adjust learning rate to 5.000000e-04 for epoch 79"


def test_a_step_is_logged_once_if_training_starts_on_it() -> None:
    resumed = schedule(begin_epoch=30)
    assert resumed.adjustment() == resumed.adjustment(30)
    assert resumed.changes(301) is None
    assert resumed.changes(601) == "Update[601]: Change learning rate to 1.00000e-03"
    assert schedule(begin_epoch=29.9).changes(301) is not None


def test_two_steps_at_one_update_are_logged_in_one_line() -> None:
    made = schedule(lr=1.0, step_epochs=".1,.15", epoch_size=3)
    assert made.changes(1) == "Update[1]: Change learning rate to 1.00000e-02"
    assert made.changes(2) is None


# --- properties

EPOCHS = st.lists(st.floats(0, 30), max_size=4, unique=True).map(lambda epochs: ",".join(map(repr, sorted(epochs))))
FLAGS: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {
        "lr": st.floats(1e-6, 10),
        "factor": st.floats(0, 1),
        "step_epochs": EPOCHS | st.sampled_from(["pow1", "pow2", "pow.5"]),
        "kind": st.sampled_from(KINDS),
        "epoch_size": st.integers(1, 40),
        "num_epochs": st.integers(1, 30),
        "warmup_epochs": st.floats(0, 10),
        "warmup_strategy": st.sampled_from(["linear", "power2", "sqrt"]),
    }
)


@settings(deadline=None, max_examples=60)
@given(FLAGS)
def test_rates_rise_in_the_warm_up_and_never_after(flags: dict[str, Any]) -> None:
    made = make_schedule(**flags)
    updates = range(flags["num_epochs"] * flags["epoch_size"] + 3)
    warm = flags["warmup_epochs"] * flags["epoch_size"]
    for one, other in pairwise(updates):
        if one >= warm:
            assert made.rate(other) <= made.rate(one)
        elif other < warm:
            assert made.rate(other) >= made.rate(one)
    assert all(0 <= made.rate(update) <= flags["lr"] * (1 + 1e-12) for update in updates)


@settings(deadline=None, max_examples=60)
@given(FLAGS, st.integers(0, 30))
def test_a_resumed_run_has_the_rates_of_one_that_was_not_stopped(flags: dict[str, Any], begin: int) -> None:
    whole, resumed = make_schedule(**flags), make_schedule(**flags, begin_epoch=begin)
    first = begin * flags["epoch_size"] + 1
    for update in range(first, first + 50):
        assert resumed.rate(update) == whole.rate(update)


@settings(deadline=None, max_examples=60)
@given(FLAGS.filter(lambda flags: flags["kind"] == "step" and 0 < flags["factor"] < 1), st.integers(0, 30))
def test_every_step_is_logged_where_it_happens(flags: dict[str, Any], begin: int) -> None:
    """From any start, there is a line wherever the rate differs from the one before."""
    if "pow" in flags["step_epochs"]:
        flags = flags | {"step_epochs": "3,4"}
    made = make_schedule(**(flags | {"warmup_epochs": 0}), begin_epoch=begin)
    first = begin * flags["epoch_size"] + 1
    for update in range(first, first + 200):
        differs = made.rate(update) != made.rate(update - 1) if update > first else False
        line = made.changes(update)
        assert bool(line) or not differs
        assert line is None or line == f"Update[{update}]: Change learning rate to {made.rate(update):0.5e}"
    assert (made.adjustment() is None) == all(float(s) > begin for s in flags["step_epochs"].split(",") if s)


@settings(deadline=None, max_examples=60)
@given(FLAGS.filter(lambda flags: flags["factor"] < 1), st.integers(0, 20))
def test_mxnets_shifted_steps_give_the_same_rates(flags: dict[str, Any], begin: int) -> None:
    """MXNet restarts the counter, applies past steps at once, and shifts the other steps."""
    steps, size = [5, 7, 16], flags["epoch_size"]
    made = make_schedule(**(flags | {"kind": "step", "step_epochs": "5,7,16", "warmup_epochs": 0}), begin_epoch=begin)
    lr = flags["lr"] * math.prod([flags["factor"]] * sum(step <= begin for step in steps))
    shifted = [size * (step - begin) for step in steps if step > begin]
    for count in range(1, 12 * size):
        expected = lr * math.prod([flags["factor"]] * sum(count > step for step in shifted))
        assert made.rate(begin * size + count) == pytest.approx(expected, rel=1e-12)


# --- errors


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"step_epochs": "30,abc"}, "--lr-step-epochs '30,abc' is neither a list such as 30,60"),
        ({"step_epochs": "30,"}, "--lr-step-epochs '30,' is neither a list"),
        ({"step_epochs": "60,30"}, "--lr-step-epochs '60,30': give epochs of 0 or more, in increasing order"),
        ({"step_epochs": "30,30"}, "in increasing order"),
        ({"step_epochs": "-1,30"}, "give epochs of 0 or more"),
        ({"step_epochs": "nan"}, "give epochs of 0 or more"),
        ({"step_epochs": "pow"}, "--lr-step-epochs 'pow': write a power like pow2"),
        ({"step_epochs": "pow0"}, "with a number above 0"),
        ({"lr": -0.1}, "--lr -0.1: give a number of 0 or more"),
        ({"lr": math.nan}, "--lr nan: give a number of 0 or more"),
        ({"factor": -0.5}, "--lr-factor -0.5: give a number of 0 or more"),
        ({"warmup_epochs": -1}, "--warmup-epochs -1: give a number of 0 or more"),
        ({"epoch_size": 0}, "updates per epoch: 0: give a number of 1 or more"),
        ({"kind": "cosinus"}, "--lr-schedule 'cosinus': use one of step, poly, cosine, constant"),
        ({"warmup_strategy": "lars"}, "--warmup-strategy 'lars': use one of linear, constant, power2, sqrt"),
    ],
)
def test_invalid_schedules_are_rejected(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        schedule(**flags)
