"""Trainers that run the optimizer in this process: when `backward()` returns, gradients are the mean over the workers.

So everything that a loop does with gradients before it runs the optimizer (clipping, GradScaler, reading them, a second
backward pass) has the same effect on all workers, as under DistributedDataParallel. The first gradient of a backward
pass queues a callback in the autograd engine, which finishes the reduction when the pass ends. Each reduction replaces
`.grad` by the mean of the workers' `.grad`. What was a mean before stays as it is, so several backward passes add up.

`step` reduces only if nothing was reduced since the last step, or if gradients were added to afterwards. A worker that
makes a step without a backward pass therefore takes part in the reduction that the others make in backward. A worker
that has no more data takes part in all reductions until no worker has data, and then copies the weights of the last
worker that made steps.

A reduction also sums a short vector (`StepVector`), with which workers detect that their steps do not match.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.optim import LBFGS

from echelon.errors import UsageError
from echelon.train.trainer.attached import Closure
from echelon.train.trainer.base import Trainer

_REDUCING: WeakSet[MeanGradientTrainer] = WeakSet()  # of this process; those that have retired are not in it
_PERIOD = 97  # clocks are compared modulo this number, so that sums of their squares are exact in float32


class StepTotals(NamedTuple):
    """The sums of the workers' step vectors."""

    samples: Tensor  # in the batches of all workers
    halt: Tensor  # not 0 if a worker asks all to stop
    clocks: Tensor  # the sums of the active workers' clocks, and of the squares of these
    retired: Tensor  # the number of workers that only take part to the end
    active: Tensor  # for each rank, 1 if it still has data
    used: Tensor  # for each parameter, the number of workers that have a gradient

    @classmethod
    def of(cls, vector: Tensor, size: int) -> StepTotals:
        """Return the parts of a sum of `step_vector`s."""
        return cls(vector[0], vector[1], vector[2:4], vector[4], vector[5 : 5 + size], vector[5 + size :])

    @property
    def clocks_are_equal(self) -> bool:
        """Whether all active workers are at the same clock."""
        total, squares = self.clocks.tolist()
        return bool(round(squares * float(self.active.sum())) == round(total * total))


def step_vector(
    samples: float,
    halt: float,
    clock: int,
    used: Iterable[bool],
    *,
    rank: int,
    size: int,
    active: bool,
    retired: bool = False,
) -> list[float]:
    """Return what a worker adds to the sums of a step."""
    position = float(clock % _PERIOD) if active else 0.0
    ranks = [float(active and one == rank) for one in range(size)]
    return [samples, halt, position, position * position, float(retired), *ranks, *map(float, used)]


class MeanGradientTrainer(Trainer, ABC):
    """Replaces the gradients by their mean over the workers when a backward pass ends."""

    _reduces = False  # a process that trains alone does not
    _is_needed_to_the_end = True  # because the others' reductions do not work without this worker
    _types: dict[str, tuple[torch.dtype, torch.device]]  # of the parameters, at the start

    def _start(self) -> None:
        super()._start()
        self._types = {}

    def _start_reducing(self, num_workers: int) -> None:
        self._reduces = True
        self._num_workers = num_workers
        self._backward: int | None = None  # the autograd engine's number of the pass that is being reduced
        self._has_added = False  # whether gradients were added to since the last reduction
        self._has_reduced = False  # whether there was a reduction since the last step
        self._samples_reduced = 0  # in the backward passes of this step
        self._last_totals: StepTotals | None = None
        self._check_unchanged_types()
        self._meets = False  # whether this worker waits for all others
        _REDUCING.add(self)
        self.kvstore.on_retire = self._retire
        self.kvstore.before_barrier = self._take_part_without_data
        self._watch_gradients(self._parameters)

    def _watch_gradients(self, parameters: Mapping[str, nn.Parameter]) -> None:
        for name, parameter in parameters.items():
            self._hooks.append(parameter.register_post_accumulate_grad_hook(self._make_grad_hook(name)))

    # --- what the kinds provide

    @property
    @abstractmethod
    def _has_sent_early(self) -> bool:
        """Whether gradients were sent since the last reduction."""

    @abstractmethod
    def _add_to_store(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Let parameters that the optimizer has got since the start take part, with rank 0's values. All call it."""

    @abstractmethod
    def _send_early(self, name: str, samples: int) -> None:
        """Start to reduce what is complete, now that backward has finished this gradient."""

    @abstractmethod
    def _reduce(self, samples: int, *, active: bool) -> StepTotals:
        """Set all gradients to their mean, weighted by samples. All workers call it. `active`: this one has data."""

    @abstractmethod
    def _receive(self, totals: StepTotals) -> None:
        """Handle a request to stop, and check that clocks are equal."""

    @abstractmethod
    def _make_equal(self, sources: Sequence[int]) -> None:
        """Copy the weights of one of the workers that made the last step. All workers call it."""

    # --- backward

    @property
    def _weight(self) -> int:
        """The weight of this worker's gradients: the samples that the forward pass saw, else the same for all."""
        return 1 if self._samples_seen is None else self._samples_seen

    def _make_grad_hook(self, name: str) -> Any:
        def ready(parameter: Tensor) -> None:
            self._check_gradient(name, parameter.grad)
            self._has_added = True
            if self._accumulating:
                return
            if self._backward is None:
                self._backward = torch._C._current_graph_task_id()
                Variable._execution_engine.queue_callback(self._end_backward)
            if self._overlap is not False:
                self._send_early(name, self._weight)

        return ready

    def _end_backward(self) -> None:
        self._exchange(self._weight, active=True)
        self._backward = None
        self._samples_reduced += self._weight

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.compiler.is_compiling() and torch._C._current_graph_task_id() < 0:  # not inside a checkpoint
            self._prepare()
        super()._before_forward(module, args, kwargs)

    def _prepare(self) -> None:
        """Do what must happen between two backward passes."""
        if self._reduces:
            self._check_backward_has_ended()
            self._check_unchanged_types()
        if late := self._late_parameters():
            if self._reduces:
                self._add_to_store(late)
                self._watch_gradients(late)
                self._has_added = True  # their gradients, if they have any, were not reduced
            self._parameters = {**self._parameters, **late}
            self._names = list(self._parameters)
            self._frozen = {name: p for name, p in self._frozen.items() if name not in late}

    def _check_unchanged_types(self) -> None:
        """Raise UsageError if a parameter has another dtype or device, in which the store cannot sum its gradient."""
        for name, parameter in self._parameters.items():
            before = self._types.setdefault(name, (parameter.dtype, parameter.device))
            if before != (parameter.dtype, parameter.device):
                was, now = (" on ".join(map(str, one)) for one in (before, (parameter.dtype, parameter.device)))
                raise UsageError(
                    f"{name!r} was {was} when the Trainer was created, and is {now} now; convert the model before the "
                    "Trainer is created, or create another Trainer"
                )

    def _late_parameters(self) -> dict[str, nn.Parameter]:
        """Return parameters that the optimizer got, or that were made trainable, after the Trainer was created."""
        known = {id(parameter) for parameter in self._parameters.values()}
        groups = self.optimizer.param_groups
        late = {id(p) for group in groups for p in group["params"] if p.requires_grad and id(p) not in known}
        if not late:
            return {}
        found = {name: p for name, p in self.model.named_parameters() if id(p) in late}
        if len(found) < len(late):
            raise UsageError(f"the optimizer got {len(late) - len(found)} parameters that do not belong to the model")
        return dict(reversed(found.items()))

    def _check_backward_has_ended(self) -> None:
        """Handle a backward pass that failed. If it sent gradients, the other workers have finished it.

        Otherwise they wait for the next pass of this worker.
        """
        if self._backward is not None and not self._has_sent_early:
            self._backward = None
        if self._backward is not None:
            raise UsageError(
                f"worker {self.kvstore.rank}: a backward pass failed at clock {self.clock} after it had sent "
                "gradients, so this worker cannot continue with the others; end it"
            )

    # --- step

    def _samples(self, batch_size: int | None) -> int:
        if batch_size is None:
            return self._weight
        samples = super()._samples(batch_size)
        if not self._reduces:
            return samples
        reduced = {self._samples_seen, self._samples_reduced}
        if self._has_reduced and self._samples_seen is not None and samples not in reduced:
            raise UsageError(
                f"step({samples}), but the forward pass saw {self._samples_seen} samples, and gradients were weighted "
                "with that number in backward; call step() without a number"
            )
        return samples

    def _step(self, samples: int) -> None:
        self._prepare()
        if not self._reduces:
            super()._step(samples)
            return
        self._complete_gradients(samples)
        self._clip()
        self._attached.run()

    def _end_step(self, closure: Closure | None) -> Any:
        """Pass a closure to the optimizer, which may call it several times, as LBFGS does."""
        if closure is None or self._accumulating:
            return super()._end_step(closure)
        self._prepare()

        def evaluate() -> Any:
            loss = closure()
            if self._reduces:
                self._complete_gradients(self._weight)
            self._clip()
            return loss

        loss = self._attached.run(evaluate)
        self.count(self._samples(self._batch_size))
        return loss

    def _refuse_lbfgs(self) -> None:
        if isinstance(self.optimizer, LBFGS):
            raise UsageError(
                "LBFGS decides by a worker's own loss how often it computes gradients, so several workers would not "
                "stay together: train in one process (kvstore='local') and call optimizer.step(closure)"
            )

    def _complete_gradients(self, samples: int) -> None:
        """Reduce what backward did not reduce. All workers then have the gradients of the step."""
        self._check_frozen()
        if self._has_added or not self._has_reduced:
            for name, parameter in self._parameters.items():
                self._check_gradient(name, parameter.grad)
            self._exchange(samples, active=True)
        self._has_reduced, self._samples_reduced = False, 0

    def zero_grad(self) -> None:
        """Discard the gradients."""
        super().zero_grad()
        self._has_added = False

    def _exchange(self, samples: int, *, active: bool) -> StepTotals:
        totals = self._last_totals = self._reduce(samples, active=active)
        self._has_added, self._has_reduced = False, True
        self._receive(totals)
        return totals

    def _clocks_error(self) -> UsageError:
        return UsageError(
            f"worker {self.kvstore.rank} is at clock {self.clock}, but other workers are at other clocks: some made a "
            "step after a backward pass and others did not. All workers must make the same calls: decide on the mean "
            "over the workers (gradients after backward), not on a worker's own loss"
        )

    # --- the end

    def _retire(self) -> None:
        self.kvstore.on_retire = self.kvstore.before_barrier = lambda: None
        self._has_retired = self._is_needed_to_the_end
        _REDUCING.discard(self)
        self._take_part_without_data()

    def _are_all_here(self, totals: StepTotals) -> bool:
        """Return whether no worker is in a step. A worker that has retired waits until all have retired."""
        if totals.active.any():
            return False
        return not self._has_retired or int(totals.retired) == len(totals.active)

    def _take_part_without_data(self) -> None:
        """Take part in the reductions of the others until all workers are here, then make the weights equal.

        Another worker may still make steps of this worker's other Trainers, which need all workers, too.
        """
        if self._meets:
            return  # `_make_equal` has barriers, too
        waiting = [self, *self._siblings()]
        for trainer in waiting:
            trainer._meets, trainer._clock_at_barrier = True, trainer.clock
        try:
            with ThreadPoolExecutor(len(waiting)) as pool:
                others = [pool.submit(trainer._take_part_until_all_are_here) for trainer in waiting[1:]]
                self._take_part_until_all_are_here()
            for other in others:
                other.result()
        finally:
            for trainer in waiting:
                trainer._meets = False

    def _siblings(self) -> list[MeanGradientTrainer]:
        """Return the other Trainers of this worker whose steps need all workers, as those of this one do."""
        others = [trainer for trainer in _REDUCING if trainer is not self and not trainer._meets]
        return [trainer for trainer in others if self.kvstore.is_beside(trainer.kvstore)]

    def _take_part_until_all_are_here(self) -> None:
        while True:
            last = self._last_totals
            totals = self._exchange(0, active=False)
            self._clear_gradients()
            if last is not None and not totals.active.any():
                ranks = [rank for rank, active in enumerate(last.active.tolist()) if active]
                if 0 < len(ranks) < self._num_workers:
                    self._make_equal(ranks)
            if self._are_all_here(totals):
                return
