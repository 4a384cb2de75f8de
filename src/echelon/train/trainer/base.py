"""The Trainer: five changed lines turn a plain PyTorch loop into a distributed one.

    trainer = echelon.Trainer(model, optimizer, kvstore="dist_ssync", staleness=3)
    for images, labels in batches:
        loss = criterion(model(images), labels)
        loss.backward()
        trainer.step(len(images))

What happens in between is the store's matter: with servers (`server_trainer.py`) gradients are pushed and weights come
back; without (`collective_trainer.py`) gradients are summed and the optimizer runs here; a worker with several devices
(`multi_device_trainer.py`) does the first after summing between them. `Trainer(…)` picks the one that fits the store.
"""

from __future__ import annotations

import operator
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from echelon.cluster.shares import Groups
from echelon.errors import UsageError
from echelon.kvstore import KVStore, create
from echelon.kvstore.collective.store import CollectiveStore
from echelon.kvstore.create import has_devices, is_collective
from echelon.kvstore.multi_device import MultiDeviceStore

REPORT_S = 0.25


class Hook(Protocol):
    """What was put on a model for as long as it is trained."""

    def remove(self) -> None:
        """Take it off. Harmless when done twice."""
        ...


class Trainer:
    """Keeps a model in step with the others."""

    def __new__(
        cls, model: nn.Module, optimizer: Optimizer, kvstore: str | KVStore = "local", **options: Any
    ) -> Trainer:
        """The kind that fits the store."""
        if cls is not Trainer:
            return super().__new__(cls)
        if is_collective(kvstore) if isinstance(kvstore, str) else isinstance(kvstore, CollectiveStore):
            from echelon.train.trainer.collective import CollectiveTrainer

            return super().__new__(CollectiveTrainer)
        if has_devices() if isinstance(kvstore, str) else isinstance(kvstore, MultiDeviceStore):
            from echelon.train.trainer.multi_device import MultiDeviceTrainer

            return super().__new__(MultiDeviceTrainer)
        from echelon.train.trainer.server import ServerTrainer

        return super().__new__(ServerTrainer)

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        kvstore: str | KVStore = "local",
        *,
        staleness: int | None = None,
        groups: Groups | None = None,
        overlap: bool = True,
        average_buffers: bool = False,
        check_finite: bool = False,
        push_factors: bool = False,
    ) -> None:
        self._parameters = _trainable(model, optimizer)
        self._frozen = _frozen(model, optimizer)
        self._names = list(self._parameters)
        if isinstance(kvstore, str):
            device = self._parameters[self._names[0]].device
            kvstore = create(kvstore, staleness=staleness, groups=groups, device=device)
        elif staleness is not None or groups is not None:
            raise UsageError("staleness and groups go with a store's name; a store that is made already has its own")
        self.kvstore = kvstore
        self.model = model
        self.optimizer = optimizer
        self.clock = 0
        self.samples = 0
        self.wait_s = 0.0
        self.staleness: Counter[int] = Counter()
        self._overlap = overlap
        self._check_finite = check_finite
        self._push_factors = push_factors
        self._accumulating = False
        self._seen: int | None = None  # samples in the batch, as the forward pass saw it
        self._carried = 0  # of these, samples of parts whose gradients were only accumulated
        self._last_report = 0.0
        self._buffers = [b for b in model.buffers() if b.is_floating_point()] if average_buffers else []
        # Kept to be removed: a parameter's hooks are out of the garbage collector's sight, and hold the trainer.
        self._hooks: list[Hook] = []
        self._start()
        self._watch: Hook = model.register_forward_pre_hook(self._watcher(), with_kwargs=True)
        self._hooks.append(self._watch)

    # --- the loop

    def step(self, batch_size: int | None = None) -> None:
        """End a step: what has not left yet leaves now. `batch_size` defaults to what the forward pass saw."""
        if self._accumulating:
            return
        samples = self._samples(batch_size)
        self._step(samples)
        self.count(samples)

    def count(self, samples: int) -> None:
        """The host's part of a step: clocks and reports."""
        self.clock += 1
        self.samples += samples
        self._seen, self._carried = None, 0
        if time.monotonic() - self._last_report >= REPORT_S:
            self.report()

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Inside, backward only adds to the gradients and `step` does nothing: for batches in several parts."""
        self._accumulating = True
        try:
            yield
        finally:
            self._accumulating = False

    def close(self) -> None:
        """Finish what is under way and leave the job; the model keeps its weights and loses the hooks."""
        self.sync()
        self.unhook()
        self.report()
        self.kvstore.close()

    def unhook(self) -> None:
        """See forward and backward passes of the model no more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()

    # --- what the kinds do

    @property
    def lock_step(self) -> bool:
        """Whether every step waits for all workers."""
        raise NotImplementedError

    @property
    def capturable(self) -> bool:
        """Whether `update` is work of the device alone, which a CUDA graph can record."""
        return False

    def update(self) -> None:
        """The device's part of a step, where it is `capturable`; `count` is the host's."""
        raise UsageError(f"{self.kvstore.type} meets others in every step: call step(), not update()")

    def sync(self) -> None:
        """Wait until every parameter has the weights of the last step."""
        raise NotImplementedError

    def refresh(self) -> None:
        """Fetch the newest weights, others' last pushes included."""
        raise NotImplementedError

    def zero_grad(self) -> None:
        """Forget gradients that have not left."""
        raise NotImplementedError

    def average_buffers(self) -> None:
        """Set floating-point buffers (BatchNorm's statistics) to their mean over the workers. All must call it."""
        raise NotImplementedError

    def over_devices(self, sums: Tensor) -> Tensor:
        """The sums of all devices that make steps together, on the CPU. All of them call it after the same step."""
        return sums.to("cpu", copy=True)

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Put weights and buffers into the model and the store. All workers call it."""
        raise NotImplementedError

    def optimizer_state(self) -> dict[str, Tensor]:
        """The optimizer's state as whole tensors on the CPU, `<parameter>/<state>`. All workers call it."""
        raise NotImplementedError

    def load_optimizer_state(self, state: Mapping[str, Tensor]) -> None:
        """Take up what `optimizer_state` gave, under whichever store. All workers call it, with the same."""
        raise NotImplementedError

    def _start(self) -> None:
        raise NotImplementedError

    def _step(self, samples: int) -> None:
        raise NotImplementedError

    @property
    def _have_left(self) -> bool:
        """Whether gradients of the step under way are with the others already."""
        raise NotImplementedError

    # --- batches

    def _watcher(self) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        """A function, not a method: a copy of the model would copy a method with all that it belongs to."""

        def watch(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if module is self.model:  # and not a copy, which has the hooks, too
                self._before_forward(module, args, kwargs)

        return watch

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            return  # who compiles a whole step tells its size
        first = next((a for a in (*args, *kwargs.values()) if isinstance(a, Tensor) and a.ndim), None)
        if first is not None and torch.is_grad_enabled() and module.training:
            self._seen = first.shape[0] + self._carried
            if self._accumulating:
                self._carried = self._seen

    def _samples(self, batch_size: int | None) -> int:
        if batch_size is None:
            if self._seen is None:
                raise UsageError("step() needs the batch size: no forward pass in training mode was seen to tell it")
            return self._seen
        batch_size = _whole(batch_size)
        if self._seen is not None and batch_size != self._seen and self._have_left:
            raise UsageError(
                f"step({batch_size}) but the forward pass saw {self._seen} samples, and gradients have left with that "
                "number; pass Trainer(overlap=False) if the first dimension of the input is not the batch"
            )
        return batch_size

    # --- mistakes that all kinds know

    def _check_frozen(self) -> None:
        """What was thawed after this was made is unknown to the others."""
        for name, parameter in self._frozen.items():
            if parameter.grad is not None:
                raise UsageError(
                    f"{name!r} required no gradient when the Trainer was made, and has one now that would be ignored; "
                    "make the Trainer when all that is to be trained requires one"
                )

    def _second_backward(self) -> UsageError:
        return UsageError(
            f"worker {self.kvstore.rank}: a second backward before step(), and the first one's gradients leave "
            "as they come; use 'with trainer.accumulate():' for batches in parts, or Trainer(overlap=False)"
        )

    def _changed_gradient(self, name: str) -> UsageError:
        return UsageError(
            f"the gradient of {name!r} was changed after gradients had left during backward (clipping?); "
            "use Trainer(overlap=False), which sends at step()"
        )

    def _not_finite(self, name: str) -> UsageError:
        return UsageError(
            f"worker {self.kvstore.rank}: the gradient of {name!r} at clock {self.clock} has NaN or infinity in it"
        )

    # --- reports

    def report(self) -> None:
        """Write down what this worker has done so far."""
        self._last_report = time.monotonic()
        self.kvstore.events.write("progress", **self.facts())

    def facts(self) -> dict[str, Any]:
        """What this worker has done so far."""
        return {
            "rank": self.kvstore.worker_rank,
            "clock": self.clock,
            "samples": self.samples,
            "wait_s": round(self.wait_s, 6),
            "staleness": {str(value): count for value, count in sorted(self.staleness.items())},
        }


def _whole(samples: int) -> int:
    """A number of samples; what is nearly one (NaN, 2.5) would spoil the weights of everybody's gradients."""
    try:
        count = operator.index(samples)
    except TypeError:
        count = -1
    if count < 0:
        raise UsageError(f"step({samples}): a batch has a whole number of samples, 0 or more")
    return count


def _frozen(model: nn.Module, optimizer: Optimizer) -> dict[str, nn.Parameter]:
    """The parameters that the optimizer has and that are not trained for now."""
    optimized = _optimized(optimizer)
    return {name: p for name, p in model.named_parameters() if not p.requires_grad and id(p) in optimized}


def _optimized(optimizer: Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def _trainable(model: nn.Module, optimizer: Optimizer) -> dict[str, nn.Parameter]:
    """The parameters to train, last layer first: about the order in which backward finishes them."""
    optimized = _optimized(optimizer)
    named = {name: p for name, p in model.named_parameters() if p.requires_grad and id(p) in optimized}
    strangers = len(optimized - {id(p) for p in model.parameters()})
    if strangers:
        raise UsageError(f"the optimizer has {strangers} parameters that are not the model's")
    if not named:
        raise UsageError("the optimizer has no parameter of the model that requires a gradient")
    return dict(reversed(named.items()))
