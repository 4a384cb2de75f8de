"""Runs a loop in one way, and compares it with its reference."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import Any

import pytest
import torch

import tolerances
from echelon.environment import variable
from loops.kinds import FEATURES
from loops.loop import ALONE, RELAXED, Case, Outcome, Way, all_cases
from loops.results import Flat, differences
from loops.workers import DEVICE, WORKERS, Error, Pool, Task

STEPS = 6
STEPS_TO_LEARN = 24
TOLERANCE_OF_16_BITS = STEPS * torch.finfo(torch.bfloat16).eps
TOLERANCE = tolerances.reordering(torch.float64, WORKERS * 8 * FEATURES, STEPS, magnification=10)

_OPTIONS: dict[Way, dict[str, Any]] = {Way.SSYNC: {"staleness": 2}, Way.GSYNC: {"groups": [[0], [1]]}}
_STORES = {Way.ONE: "dist_sync", Way.COLLECTIVE: "dist_sync"}

_NEEDS_GPUS = "without servers, each worker needs a GPU of its own (NCCL)"

pool = functools.cache(Pool)


def parameters(ways: Iterable[Way], *, only_reading: bool = False) -> list[Any]:
    """Return the parameters of a test: every loop in these ways."""
    cases = [case for case in all_cases().values() if case.reads_weights or not only_reading]
    return [
        pytest.param(case, way, id=f"{case.name}-{way.value}", marks=_marks(case, way))
        for case in cases
        for way in ways
    ]


def _marks(case: Case, way: Way) -> list[pytest.MarkDecorator]:
    if variable(DEVICE) and (reason := case.only_on_cpu or (way is Way.COLLECTIVE and _NEEDS_GPUS)):
        return [pytest.mark.skip(reason)]
    if way in RELAXED and way is not RELAXED[list(all_cases()).index(case.name) % len(RELAXED)]:
        return [pytest.mark.long]  # each loop runs with one relaxed scheme, each theme with all of them
    return []


def check(case: Case, way: Way, *, delay_s: float = 0.0) -> None:
    """Run a loop in a way. Fail if it does not end as the table says."""
    expected = reference(case, way) if case.is_compared(way) else None
    found = pool().run(*_tasks(case, way, delay_s))
    outcome = case.outcomes[way]
    if outcome.refused is not None:
        _check_refused(found, outcome)
        return
    for rank, one in enumerate(found):
        if isinstance(one, Error):
            pytest.fail(f"worker {rank}: {one.trace}", pytrace=False)
        if case.workers_agree and rank and not isinstance(found[0], Error):
            _check_same(one, found[0], 0.0, f"worker {rank} beside worker 0", losses=False)
        if expected is None:
            _check_learns(case, one)
        else:
            losses = way is Way.ONE or case.reference != ALONE
            _check_same(one, expected[rank], _tolerance(case, way), f"worker {rank}", losses=losses)


@functools.cache
def _reference(case: str, kind: str, dtype: torch.dtype, size: int) -> list[Flat]:
    if kind == "ddp":
        tasks = [Task(case, STEPS, dtype, "ddp", [rank], size) for rank in range(size)]
    else:
        tasks = [Task(case, STEPS, dtype, "plain", range(size), 1)]
    found = pool().run(*tasks)
    for one in found:
        if isinstance(one, Error):
            pytest.fail(f"the reference ({kind}) fails: {one.trace}", pytrace=False)
    return [one for one in found if not isinstance(one, Error)] * (size if kind != "ddp" else 1)


def reference(case: Case, way: Way) -> list[Flat]:
    """Return what each worker must end with: what plain PyTorch or DDP gives."""
    if way is Way.ONE:
        return _reference(case.name, "plain", _dtype(way), 1)
    return _reference(case.name, "plain" if case.reference == ALONE else "ddp", _dtype(way), WORKERS)


def _tasks(case: Case, way: Way, delay_s: float) -> list[Task]:
    size = 1 if way is Way.ONE else WORKERS
    return [
        Task(
            case.name,
            STEPS_TO_LEARN if way in RELAXED else STEPS,
            _dtype(way),
            "trainer",
            [rank],
            size,
            store=_STORES.get(way, way.value),
            servers=way is not Way.COLLECTIVE,
            delay_s=delay_s,
            options=_OPTIONS.get(way, {}),
        )
        for rank in range(size)
    ]


def _dtype(way: Way) -> torch.dtype:
    """Return the dtype of the models: float32 where bits are compared, else that whose rounding hides least."""
    return torch.float32 if way is Way.ONE and not variable(DEVICE) else torch.float64


def _tolerance(case: Case, way: Way) -> float:
    if not case.exact or (variable(DEVICE) and not case.exact_on_gpu):
        return TOLERANCE_OF_16_BITS
    # Servers update on the CPU, whose kernels round differently from those of a GPU.
    return 0.0 if way is Way.ONE and not variable(DEVICE) else TOLERANCE * case.magnification


def _check_refused(found: list[Flat | Error], outcome: Outcome) -> None:
    """At least one worker gets the error. The others may only see that the job has failed."""
    errors = [one for one in found if isinstance(one, Error)]
    assert len(errors) == len(found), "a worker ended without an error"
    text = outcome.refused or ""
    matching = [error for error in errors if text in error.text]
    if not matching:
        pytest.fail(f"no error contains {text!r}:\n" + "\n".join(error.trace for error in errors), pytrace=False)
    for error in errors:
        assert error.refused, f"not an error of Echelon: {error.trace}"
        assert "\n" not in error.text, f"more than one line: {error.text}"


def _check_same(found: Flat, expected: Flat, tolerance: float, who: str, *, losses: bool) -> None:
    """`losses`: whether those of the steps are compared, too. With ALONE the reference has those of joined batches."""
    if not losses:
        found, expected = _without_losses(found), _without_losses(expected)
    if lines := differences(found, expected, tolerance):
        pytest.fail(f"{who}:\n  " + "\n  ".join(lines[:12]), pytrace=False)


def _without_losses(found: Flat) -> Flat:
    return {path: value for path, value in found.items() if not path.startswith("losses[")}


def _check_learns(case: Case, found: Flat) -> None:
    losses = [
        float(value) for path, value in found.items() if path.startswith("losses[") and not isinstance(value, str)
    ]
    assert all(map(math.isfinite, losses)), f"losses are not finite: {losses}"
    third = len(losses) // 3
    if case.learns and third:
        first, last = sum(losses[:third]) / third, sum(losses[-third:]) / third
        assert last < first, f"the mean loss went from {first:g} to {last:g}: {losses}"
