"""A store under test: how to run a program on its workers, and what its scheme guarantees."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor

from echelon.kvstore import KVStore
from echelon.schemes import store_kind

T = TypeVar("T")
Run = Callable[..., list[Any]]


@dataclass(frozen=True, slots=True)
class Trial:
    """A store under test. `run(program, store, **options)` runs the program on every worker and returns the results."""

    run: Run
    store: str
    num_workers: int
    num_servers: int
    options: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, program: Callable[[KVStore], T], **more: Any) -> list[T]:
        """Run a program in a new job and return the result of each rank."""
        given = {"num_workers": self.num_workers, "num_servers": self.num_servers, **self.options, **more}
        return self.run(program, self.store, **given)

    def alone(self, program: Callable[[KVStore], T], **more: Any) -> T:
        """Run a program on a single worker, so that the order of pushes is fixed."""
        groups = {"groups": [[0]]} if "groups" in self.options else {}
        return self(program, num_workers=1, **groups, **more)[0]

    @property
    def push_replaces(self) -> bool:
        """Whether a push without an optimizer replaces the value; only if a round sums over all workers."""
        return store_kind(self.store).lock_step

    @property
    def collective(self) -> bool:
        """Whether the store has no servers; then all workers save and load its state together."""
        return store_kind(self.store).is_collective(self.num_servers)

    @property
    def lock_step(self) -> bool:
        """Whether the next pull of any worker contains the pushes of all workers with the same clock."""
        return self.push_replaces or self.options.get("groups") == [list(range(self.num_workers))]


def pull_all_pushes(kv: KVStore, key: Any, out: Any) -> None:
    """Pull the weights that contain all pushes of all workers so far, under any scheme.

    The first pull waits for this worker's pushes. After the barrier, every worker's pushes are applied.
    """
    kv.pull(key, out)
    kv.barrier()
    kv.pull(key, out)
    kv.barrier()


def sum_of_pushes(num_workers: int) -> float:
    """Return the sum over all workers if worker r pushes r + 1."""
    return num_workers * (num_workers + 1) / 2


def rank_order_sum(parts: list[Tensor]) -> Tensor:
    """Return the sum as servers compute it: in rank order, in the precision of the tensors."""
    result = parts[0].clone()
    for part in parts[1:]:
        result += part
    return result
