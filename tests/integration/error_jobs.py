"""Shared by the tests of errors: jobs of two workers, and the check that a job still works after an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from echelon.errors import UsageError
from echelon.kvstore import KVStore
from echelon.launch.threads.in_process import run

DEADLINE_S = 10.0
STORES: dict[str, dict[str, Any]] = {
    "dist_sync": {},
    "dist_async": {},
    "dist_ssync": {"staleness": 1},
    "dist_gsync": {"groups": [[0, 1]]},
}


def run_job(program: Callable[[KVStore], Any], store: str = "dist_sync", **options: Any) -> list[Any]:
    """Run a program on two workers of a store with servers."""
    return run(program, store, **{"num_workers": 2, "timeout_s": DEADLINE_S, **STORES[store], **options})


def error_of(call: Callable[[], object]) -> str:
    """Return the message of the UsageError that a call raises, or an empty text."""
    try:
        call()
    except UsageError as error:
        return str(error)
    return ""


def prepare(kv: KVStore) -> None:
    """Initialise the key that `check_still_works` uses."""
    kv.init("good", torch.zeros(3))
    if kv.type != "dist_sync":
        kv.set_optimizer("sgd", lr=1.0, maximize=True)


def check_still_works(kv: KVStore, key: Any = "good", shape: tuple[int, ...] = (3,)) -> None:
    """Let every worker push ones, and check that the sum is their number.

    An error that harmed the servers, or left a worker one step behind, would show here as a wrong sum or a timeout.
    """
    out = torch.empty(shape)
    kv.pushpull(key, torch.ones(shape), out)
    kv.pull(key, out)
    kv.barrier()
    kv.pull(key, out)
    assert out.eq(kv.num_workers).all(), f"worker {kv.rank}: {out}"
    kv.barrier()
