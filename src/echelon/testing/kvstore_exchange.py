"""Checks of the values that workers exchange: gather and all_reduce."""

from __future__ import annotations

from typing import Any

import torch

from echelon.errors import UsageError
from echelon.kvstore import KVStore
from echelon.testing.assertions import assert_equal, assert_raises, assert_tensor
from echelon.testing.trial import Trial


def gather_returns_the_values_of_all_workers(trial: Trial) -> None:
    """Tensors may have different shapes and dtypes; numbers, text, lists and dicts come back as they are."""

    def program(kv: KVStore) -> None:
        ranks = range(trial.num_workers)
        tensors = kv.gather(torch.full([kv.rank, 2], kv.rank, dtype=torch.bfloat16))
        assert_equal("shapes", [tuple(tensor.shape) for tensor in tensors], [(rank, 2) for rank in ranks])
        assert_equal("dtypes", {tensor.dtype for tensor in tensors}, {torch.bfloat16})
        assert_equal("flags", [bool(flag) for flag in kv.gather(torch.tensor(kv.rank == 1))], [r == 1 for r in ranks])
        for value in (kv.rank + 0.5, f"worker {kv.rank}", {"loss": [kv.rank, None], "name": "x"}):
            found = kv.gather(value)
            assert_equal("one value per worker", len(found), trial.num_workers)
            assert_equal("this worker's own", found[kv.rank], value)
        kv.barrier()

    trial(program)


def all_reduce_returns_the_same_on_all_workers(trial: Trial) -> None:
    """The mean, sum, maximum and minimum of tensors and numbers."""
    workers = trial.num_workers
    expected = {"mean": (workers - 1) / 2, "sum": workers * (workers - 1) / 2, "max": workers - 1, "min": 0}

    def program(kv: KVStore) -> dict[str, Any]:
        found = {}
        for op, value in expected.items():
            assert_equal(op, kv.all_reduce(float(kv.rank), op), value)
            assert_tensor(op, kv.all_reduce(torch.full([2, 3], float(kv.rank)), op), value)
            assert_tensor(f"{op} of half", kv.all_reduce(torch.full([3], float(kv.rank)).half(), op).float(), value)
            reduced = kv.all_reduce(torch.full([2], kv.rank, dtype=torch.int32), op)
            assert_tensor(f"{op} of integers", reduced.double(), float(value))
            found[op] = kv.all_reduce(0.1 * (kv.rank + 1), op)
        assert_equal("the default", kv.all_reduce(float(kv.rank)), expected["mean"])
        kv.barrier()
        return found

    results = trial(program)
    assert_equal("bits on all workers", results, results[:1] * workers)


def values_that_cannot_be_exchanged_are_rejected(trial: Trial) -> None:
    """A mistake raises an error on the worker that makes it, or on all if the values do not fit together."""

    def program(kv: KVStore) -> None:
        assert_raises("an object", UsageError, ("object", "cannot be exchanged"), lambda: kv.gather(object()))
        assert_raises("an operation", UsageError, ("median", "mean"), lambda: kv.all_reduce(1.0, "median"))
        assert_raises("a text", UsageError, ("tensors or numbers",), lambda: kv.all_reduce("text"))
        if trial.num_workers > 1:
            words = ("the same shape and dtype", "(1,)", "(2,)")
            assert_raises("other shapes", UsageError, words, lambda: kv.all_reduce(torch.zeros(1 + kv.rank)))
        assert_equal("afterwards", kv.all_reduce(2), 2)
        kv.barrier()

    trial(program)
