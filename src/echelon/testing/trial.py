"""A store under test: how to run a program on its workers, and what its scheme lets one expect."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor

from echelon.environment import Job
from echelon.kvstore import KVStore
from echelon.kvstore.create import is_collective

T = TypeVar("T")
Run = Callable[..., list[Any]]


@dataclass(frozen=True, slots=True)
class Trial:
    """`run(program, store, **options)` runs the program on every worker and returns what each returned, by rank."""

    run: Run
    store: str
    num_workers: int
    num_servers: int
    options: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, program: Callable[[KVStore], T], **more: Any) -> list[T]:
        """Run a program in a job of its own."""
        given = {"num_workers": self.num_workers, "num_servers": self.num_servers, **self.options, **more}
        return self.run(program, self.store, **given)

    def alone(self, program: Callable[[KVStore], T], **more: Any) -> T:
        """Run a program on a single worker: nothing depends on who comes first."""
        groups = {"groups": [[0]]} if "groups" in self.options else {}
        return self(program, num_workers=1, **groups, **more)[0]

    @property
    def replaces(self) -> bool:
        """Whether a push without an optimizer replaces the value: only where rounds are summed over all."""
        return self.store == "dist_sync" or self.collective

    @property
    def collective(self) -> bool:
        """Whether the store has no servers: what concerns its state, all workers do together."""
        return is_collective(self.store, Job(scheduler_port=1, num_servers=self.num_servers))

    @property
    def in_step(self) -> bool:
        """Whether all workers' pushes of a clock are in the weights that any of them pulls next."""
        return self.replaces or self.options.get("groups") == [list(range(self.num_workers))]


def everybody(kv: KVStore, key: Any, out: Any) -> None:
    """Pull what all workers' pushes so far have come to, under any scheme: own pushes, then everybody's."""
    kv.pull(key, out)
    kv.barrier()
    kv.pull(key, out)
    kv.barrier()


def total(num_workers: int) -> float:
    """The sum of what workers push when worker r pushes r + 1."""
    return num_workers * (num_workers + 1) / 2


def rank_order_sum(parts: list[Tensor]) -> Tensor:
    """The sum as servers make it: in rank order, in the tensors' own precision."""
    result = parts[0].clone()
    for part in parts[1:]:
        result += part
    return result
