"""NaN and infinity in updates: the key, the worker and the clock are found, and finite values cost no search."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from echelon.cluster.placement import KeySpec, Layout
from echelon.server.optimizer.kernel import Kernel, Progress, Step
from echelon.server.optimizer.kernels import kernel_for
from echelon.server.storage.execute import CHUNK, Storage, Task, Update, WeightedGradient
from echelon.server.storage.finite import Finding, Origin, is_finite
from echelon.server.storage.memory import Mapped
from echelon.server.storage.rows import PushedRows
from echelon.server.storage.tables import RowUpdate, WeightedRows

pytestmark = pytest.mark.numeric

LENGTHS = (5, CHUNK + 100, 1, 70)
STEP = Step(Progress(), 0.1)
SGD = {"lr": 0.1, "momentum": 0.0, "dampening": 0, "weight_decay": 0, "nesterov": False, "maximize": False}


class Pushes:
    """Keys of some lengths on one server, and a gradient of each of two workers."""

    def __init__(self, dtype: str = "float32") -> None:
        self.layout = Layout(1)
        self.slots = self.layout.place([KeySpec(f"k{i}", (length,), dtype) for i, length in enumerate(LENGTHS)])
        self.storage = Storage(self.layout, 0)
        (segment,) = self.layout.segments
        self.gradients = []
        for _ in range(2):
            window = Mapped()
            window.segments[segment.index] = torch.ones(segment.capacity, dtype=getattr(torch, dtype))
            self.gradients.append(window)

    def set(self, worker: int, key: int, index: int, value: float) -> None:
        self.gradients[worker].segments[0][self.slots[key].start + index] = value

    def run(self, kernel: Kernel | None = None, weight: float = 0.5, clock: int = 7) -> list[Finding]:
        """Apply a round of workers 3 and 4; return what was found."""
        weighted = tuple(WeightedGradient(window, weight) for window in self.gradients)
        update = Update(weighted, kernel or kernel_for("sgd", SGD), STEP, Origin((3, 4), clock))
        self.storage.run([Task(tuple(slot.key for slot in self.slots), update, ())])
        return self.storage.finite.take()

    def bad_keys(self) -> list[int]:
        return self.storage.not_finite([slot.key for slot in self.slots])


VALUES = st.sampled_from([math.nan, math.inf, -math.inf])
PLACES = st.integers(0, len(LENGTHS) - 1).flatmap(
    lambda key: st.tuples(st.integers(0, 1), st.just(key), st.integers(0, LENGTHS[key] - 1), VALUES)
)


@settings(max_examples=30, deadline=None)
@given(places=st.lists(PLACES, max_size=4))
def test_every_key_with_a_bad_value_is_found_with_a_worker_that_has_one(
    places: list[tuple[int, int, int, float]],
) -> None:
    """An update is searched in chunks: the worker is the lowest that has a bad value in the first chunk with one."""
    pushes = Pushes()
    for worker, key, index, value in places:
        pushes.set(worker, key, index, value)
    expected: dict[int, set[int]] = {}
    for worker, key, _, _ in places:
        expected.setdefault(pushes.slots[key].key, set()).add(3 + worker)
    found = pushes.run()
    assert {finding.key for finding in found} == expected.keys()
    assert all(finding.worker in expected[finding.key] for finding in found)
    assert {finding.clock for finding in found} <= {7}
    assert pushes.bad_keys() == sorted(finding.key for finding in found)


def test_a_key_is_reported_once_and_again_after_its_values_were_overwritten() -> None:
    pushes = Pushes()
    pushes.set(0, 1, CHUNK + 7, math.nan)
    (found,) = pushes.run()
    assert found == Finding(pushes.slots[1].key, 3, 7)
    assert pushes.run(clock=8) == []
    pushes.storage.finite.forget([found.key])
    assert pushes.run(clock=9) == [found._replace(clock=9)]


def test_huge_finite_values_are_not_reported() -> None:
    pushes = Pushes()
    for key in range(len(LENGTHS)):
        pushes.set(0, key, 0, 3e38)
    assert pushes.run() == []  # the sum over the chunk overflows
    assert pushes.bad_keys() == []


def test_a_sum_that_overflows_has_no_worker() -> None:
    pushes = Pushes()
    for worker in (0, 1):
        pushes.set(worker, 3, 60, 3e38)
    assert pushes.run(weight=1.0) == [Finding(pushes.slots[3].key, None, 7)]


def test_a_gradient_that_is_multiplied_by_nan_is_found() -> None:
    """Clipping by a norm that is not finite multiplies all gradients by NaN, as in torch."""
    assert [found.worker for found in Pushes().run(weight=math.nan)] == [None] * len(LENGTHS)


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
def test_all_floating_types_are_checked(dtype: str) -> None:
    pushes = Pushes(dtype)
    pushes.set(1, 2, 0, math.inf)
    assert pushes.run() == [Finding(pushes.slots[2].key, 4, 7)]


def test_a_kernel_that_needs_whole_keys_is_checked() -> None:
    class Whole(Kernel):
        whole = True
        state_names = ()

        def update(self, weights: torch.Tensor, gradient: torch.Tensor, states: object, step: Step) -> None:
            weights.sub_(gradient)

    pushes = Pushes()
    pushes.set(1, 1, CHUNK + 3, math.nan)
    assert pushes.run(Whole({})) == [Finding(pushes.slots[1].key, 4, 7)]


def test_rows_of_tables_are_checked() -> None:
    layout = Layout(1)
    (slot,) = layout.place([KeySpec("t", (6, 3), "float32", row_sparse=True)])
    storage = Storage(layout, 0)
    storage.tables.add(slot.key, storage.tables.make(slot.key))
    rows = [PushedRows({slot.key: (torch.tensor([1, 4]), torch.full((2, 3), value))}) for value in (1.0, math.nan)]
    update = RowUpdate(tuple(WeightedRows(one, 0.5) for one in rows), None, STEP, Origin((0, 1), 5))
    storage.run([Task((slot.key,), update, ())])
    assert storage.finite.take() == [Finding(slot.key, 1, 5)]
    assert storage.not_finite([slot.key]) == [slot.key]


def test_integers_and_empty_tensors_are_finite() -> None:
    assert is_finite(torch.tensor([1, 2]))
    assert is_finite(torch.empty(0))
