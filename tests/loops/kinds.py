"""The kinds of runs: plain PyTorch, a Trainer, and DistributedDataParallel. Each is a `loop.Run`."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import echelon
from loops.loop import Batch, Loss, Result

FEATURES = 6
TARGETS = 3
EPOCH = 4  # batches, after which they repeat: losses of the same batch can be compared


class Plain:
    """Plain PyTorch. With several `ranks`, one process has the data of all these workers."""

    trainer: echelon.Trainer | None = None

    def __init__(self, steps: int, ranks: Sequence[int] = (0,), size: int = 1) -> None:
        self.rank, self._ranks = ranks[0], ranks
        self.size = size
        self.steps = steps
        self.recorded: list[Tensor] = []

    def attach(
        self, model: nn.Module, optimizer: Optimizer, *, ddp: Mapping[str, Any] | None = None, **options: Any
    ) -> nn.Module:
        """Return the model."""
        return model

    def batches(self, steps: int | None = None, sizes: tuple[int, int] = (8, 8)) -> Iterator[Batch]:
        """Yield batches of random vectors and what a fixed network makes of them."""
        epoch = [[_batch(rank, number, sizes[rank]) for rank in self._ranks] for number in range(EPOCH)]
        for step in range(self.steps if steps is None else steps):
            inputs, targets = zip(*epoch[step % EPOCH], strict=True)
            yield torch.cat(inputs), torch.cat(targets)

    def losses(self, net: nn.Module, loss: Loss = mse_loss, steps: int | None = None) -> Iterator[Tensor]:
        """Yield the loss of each batch, and record it."""
        for inputs, targets in self.batches(steps):
            value = loss(net(inputs), targets)
            self.record(value)
            yield value

    def record(self, loss: Tensor) -> None:
        """Record the loss of a step."""
        self.recorded.append(loss.detach().clone())

    def accumulate(self, net: nn.Module) -> AbstractContextManager[None]:
        """Backward always adds to the gradients."""
        return nullcontext()

    def edit_weights(self) -> AbstractContextManager[None]:
        """Weights are the model's own."""
        return nullcontext()

    def all_reduce(self, value: Tensor) -> Tensor:
        """Return the value."""
        return value

    def result(self, loop_result: Result) -> Result:
        """Return what the loop returned and what it recorded."""
        return {"losses": self.recorded, "result": loop_result}

    def close(self) -> None:
        """Leave the job."""


class WithTrainer(Plain):
    """A Trainer for every model, with the store of a way. The environment of the process describes the job."""

    def __init__(self, steps: int, rank: int, size: int, store: str, options: Mapping[str, Any]) -> None:
        super().__init__(steps, [rank], size)
        self._store, self._options = store, options
        self.trainers: list[echelon.Trainer] = []

    def attach(
        self, model: nn.Module, optimizer: Optimizer, *, ddp: Mapping[str, Any] | None = None, **options: Any
    ) -> nn.Module:
        """Make a Trainer, and return the model."""
        self.trainer = echelon.Trainer(model, optimizer, self._store, **{**self._options, **options})
        self.trainers.append(self.trainer)
        return model

    def accumulate(self, net: nn.Module) -> AbstractContextManager[None]:
        """Let the Trainers only accumulate."""
        assert self.trainer is not None
        return self.trainer.accumulate()

    def edit_weights(self) -> AbstractContextManager[None]:
        """Let the Trainer send the edits."""
        assert self.trainer is not None
        return self.trainer.edit_weights()

    def all_reduce(self, value: Tensor) -> Tensor:
        """Return the mean over the workers."""
        assert self.trainer is not None
        mean: Tensor = self.trainer.all_reduce(value)
        return mean

    def close(self) -> None:
        """Close the Trainers."""
        for trainer in self.trainers:
            trainer.close()


class WithDdp(Plain):
    """DistributedDataParallel. The process group exists."""

    def __init__(self, steps: int, rank: int, size: int) -> None:
        super().__init__(steps, [rank], size)
        self._model = nn.Module()  # the newest

    def attach(
        self, model: nn.Module, optimizer: Optimizer, *, ddp: Mapping[str, Any] | None = None, **options: Any
    ) -> nn.Module:
        """Return the model in DDP. Each worker has its own buffers, as with a Trainer."""
        self._model = model
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # newer versions of torch have another name for it
            return DistributedDataParallel(model, **{"broadcast_buffers": False, **(ddp or {})})

    @contextmanager
    def accumulate(self, net: nn.Module) -> Iterator[None]:
        """Do not reduce."""
        assert isinstance(net, DistributedDataParallel)
        with net.no_sync():
            yield

    @contextmanager
    def edit_weights(self) -> Iterator[None]:
        """Give all processes the weights of rank 0."""
        yield
        for parameter in self._model.parameters():
            distributed.broadcast(parameter.data, 0)

    def all_reduce(self, value: Tensor) -> Tensor:
        """Return the mean over the processes."""
        mean = value.clone()
        distributed.all_reduce(mean)
        return mean / self.size


def _batch(rank: int, number: int, size: int) -> Batch:
    inputs = _random(1000 * rank + number, size, FEATURES)
    teacher = _random(7, FEATURES, TARGETS)
    targets = torch.tanh(inputs @ teacher)
    default = torch.get_default_dtype()
    device = torch.get_default_device()
    return inputs.to(device, default), targets.to(device, default)


def _random(seed: int, *shape: int) -> Tensor:
    """Return the same numbers on every device."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
