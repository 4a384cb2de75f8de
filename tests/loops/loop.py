"""What a loop is, and what is expected of it.

A loop is a function that builds a model, an optimizer and data, trains, and returns what a user would look at
afterwards. It is written as plain PyTorch. The only difference is that it gives the model and the optimizer to
`run.attach`, and calls what comes back:

    @loop("clamps the weights after each step (WGAN)")
    def clamps(run: Run) -> Result:
        model = mlp()
        optimizer = SGD(model.parameters(), lr=0.1)
        net = run.attach(model, optimizer)
        for loss in run.losses(net):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            clamp(model)
        return model

`attach` returns the model as it is in plain PyTorch, makes a Trainer for it, or wraps it in DistributedDataParallel. So
the same lines run in every way of `kinds`.

A loop ends in one of two ways, for each way to run it: SAME result, or an error that contains a text (`refused`).
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

import echelon

Result = Any  # a model, an optimizer, a tensor, a number, a text, or a dict or a list of these
Batch = tuple[Tensor, Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]


class Run(Protocol):
    """What a loop gets: who it is, its data, and how to attach a model.

    `steps` is the number of batches of a loop that does not say another one. `trainer` is the newest Trainer, or None
    where there is none.
    """

    rank: int
    size: int
    steps: int
    trainer: echelon.Trainer | None

    def attach(
        self, model: nn.Module, optimizer: Optimizer, *, ddp: Mapping[str, Any] | None = None, **options: Any
    ) -> nn.Module:
        """Return the module to call in the loop. `options` are those of Trainer, `ddp` those of DDP."""
        ...

    def batches(self, steps: int | None = None, sizes: tuple[int, int] = (8, 8)) -> Iterator[Batch]:
        """Yield batches of this worker: vectors, and the numbers to predict. `sizes` has one number per worker."""
        ...

    def losses(self, net: nn.Module, loss: Loss = ..., steps: int | None = None) -> Iterator[Tensor]:
        """Yield the loss of each batch, and record it."""
        ...

    def record(self, loss: Tensor) -> None:
        """Record the loss of a step: losses are compared, and show whether the loop learns."""
        ...

    def accumulate(self, net: nn.Module) -> AbstractContextManager[None]:
        """Return a block in which backward only adds to the gradients of this worker."""
        ...

    def edit_weights(self) -> AbstractContextManager[None]:
        """Return a block that changes weights."""
        ...

    def all_reduce(self, value: Tensor) -> Tensor:
        """Return the mean of a value over all workers."""
        ...


@dataclass(frozen=True)
class Outcome:
    """How a loop ends under a Trainer. `refused`: the text that the error contains, or None if it gives the result."""

    refused: str | None = None


SAME = Outcome()


def refused(text: str) -> Outcome:
    """Return the outcome of a loop that ends with an error of one line, which contains this text."""
    return Outcome(text)


class Way(Enum):
    """The ways to run a loop under a Trainer, with what they are compared to."""

    ONE = "one worker"  # plain PyTorch, bit for bit
    SYNC = "dist_sync"  # two workers and two servers: DDP, within rounding
    COLLECTIVE = "without servers"  # two workers: DDP, within rounding
    ASYNC = "dist_async"  # two workers and two servers: it ends, and it learns
    SSYNC = "dist_ssync"
    GSYNC = "dist_gsync"


RELAXED = (Way.ASYNC, Way.SSYNC, Way.GSYNC)
ALONE = "alone"  # one process of plain PyTorch on the batches of both workers
DDP = "ddp"
ENDS = "ends"  # nothing: DDP cannot run the loop, or hangs; with a Trainer it must end


@dataclass(frozen=True)
class Case:
    """A loop and its outcome for each way to run it.

    `reference` is what two workers are compared to. `magnification` is by how much the loop magnifies a rounding error.
    `exact`: whether one worker gives the same bits; otherwise it is equal within rounding of the dtype.
    `exact_on_gpu`: whether no part of an update is computed in 16 bits, which CPUs and GPUs round differently.
    `reads_weights`: it reads or writes weights between steps, and is run with delayed pushes, too. `learns`: whether
    the recorded losses must fall. `workers_agree`: whether all workers end with the same result. `differs` says for
    some ways why the result is another one there; the loop must end. `only_on_cpu` says why the loop has no
    meaning on a GPU.
    """

    name: str
    theme: str
    function: Callable[[Run], Result]
    outcomes: Mapping[Way, Outcome]
    reference: str = DDP
    magnification: float = 1.0
    exact: bool = True
    exact_on_gpu: bool = True
    reads_weights: bool = False
    learns: bool = True
    workers_agree: bool = False
    differs: Mapping[Way, str] = field(default_factory=dict)
    only_on_cpu: str = ""

    def is_compared(self, way: Way) -> bool:
        """Return whether the result has a reference. Otherwise the loop must end, and learn."""
        return way is Way.ONE or (way not in RELAXED and self.reference != ENDS and way not in self.differs)


CASES: dict[str, Case] = {}


def loop(
    name: str,
    *,
    one: Outcome = SAME,
    sync: Outcome = SAME,
    collective: Outcome = SAME,
    relaxed: Outcome = SAME,
    theme: str = "",
    **details: Any,
) -> Callable[[Callable[[Run], Result]], Callable[[Run], Result]]:
    """Put a loop into the table, with its outcomes: `relaxed` is that of dist_async, dist_ssync and dist_gsync.

    `theme` defaults to the module of the loop. `details` are other fields of `Case`.
    """
    outcomes = {Way.ONE: one, Way.SYNC: sync, Way.COLLECTIVE: collective} | dict.fromkeys(RELAXED, relaxed)

    def register(function: Callable[[Run], Result]) -> Callable[[Run], Result]:
        if name in CASES:
            raise ValueError(f"two loops are named {name!r}")
        CASES[name] = Case(name, theme or function.__module__.rpartition(".")[2], function, outcomes, **details)
        return function

    return register


def all_cases() -> dict[str, Case]:
    """Import every module of `cases`, and return all loops in the order of their themes."""
    from loops import cases

    for theme in cases.THEMES:
        importlib.import_module(f"{cases.__name__}.{theme}")
    unlisted = {module.name for module in pkgutil.iter_modules(cases.__path__)} - set(cases.THEMES)
    assert not unlisted, f"cases.THEMES does not list {', '.join(sorted(unlisted))}"
    return CASES
