"""Hugging Face Accelerate over a store: a script changes its import of `Accelerator`, and names the store.

    from echelon.integrations.accelerate import Accelerator

    accelerator = Accelerator(kvstore="dist_sync")
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

Accelerate divides the data and steps the schedules by the number of workers. Steps and reductions go through stores.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import accelerate
import torch
from accelerate.state import DistributedType, PartialState
from accelerate.utils import recursively_apply
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from echelon.errors import UsageError
from echelon.integrations.workers import Workers, check_norm, finish, inside, meet, optimized_module
from echelon.train.trainer import Trainer


class Accelerator(accelerate.Accelerator):
    """`kvstore` and `max_grad_norm` are those of `echelon.Trainer`, as is everything in `trainer_options`."""

    def __init__(
        self,
        *args: Any,
        kvstore: str = "dist_sync",
        max_grad_norm: float | None = None,
        trainer_options: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        state = PartialState(cpu=bool(kwargs.get("cpu")))
        if state.distributed_type is not DistributedType.NO:
            raise UsageError(
                f"Accelerate has already set up {state.distributed_type.value}: start this program with "
                "'echelon launch -n WORKERS -s SERVERS python …' instead of 'accelerate launch' or torchrun"
            )
        self.workers = Workers(kvstore)
        state.num_processes, state.process_index = self.workers.count, self.workers.rank
        state.local_process_index = self.workers.rank
        super().__init__(*args, **kwargs)
        if self.dispatch_batches:
            raise UsageError("dispatch_batches=True lets worker 0 read for all, which is not possible; leave it out")
        self.dataloader_config.dispatch_batches = False
        self.trainers: list[Trainer] = []
        self._max_grad_norm = max_grad_norm
        self._options = {"kvstore": kvstore, "max_grad_norm": max_grad_norm} | (trainer_options or {})
        self._grad_norm = torch.tensor(torch.nan)

    def prepare(self, *args: Any, device_placement: Any = None) -> Any:
        """Prepare models, optimizers, data loaders and schedulers. Pass an optimizer together with its model."""
        models = [one for one in args if isinstance(one, nn.Module)]
        for model in models if self.device_placement else []:
            model.to(self.device)
        for optimizer in (getattr(one, "optimizer", one) for one in args if isinstance(one, Optimizer)):
            if all(trainer.optimizer is not optimizer for trainer in self.trainers):
                self._attach(optimizer, [*models, *self._models])
        return super().prepare(*args, device_placement=device_placement)

    def _attach(self, optimizer: Optimizer, models: list[nn.Module]) -> None:
        trainer = Trainer(optimized_module(optimizer, models), optimizer, **self._options)
        if self._max_grad_norm is not None:
            optimizer.register_step_post_hook(lambda *_: setattr(self._grad_norm, "data", trainer.grad_norm))
        self.trainers.append(trainer)

    def prepare_data_loader(self, data_loader: DataLoader[Any], *args: Any, **kwargs: Any) -> Any:
        """Give each worker its part of the batches, in the order that worker 0 draws."""
        given = self.dataloader_config.data_seed
        if given is None:
            self.dataloader_config.data_seed = self.workers.gather(torch.initial_seed())[0]
        loader = super().prepare_data_loader(data_loader, *args, **kwargs)
        self.dataloader_config.data_seed = given
        generator = getattr(loader, "synchronized_generator", None)
        if generator is not None:
            generator.set_state(self.workers.gather(generator.get_state())[0])
        return loader

    def no_sync(self, model: nn.Module) -> AbstractContextManager[object]:
        """Only add to the gradients of the models inside."""
        own = [trainer for trainer in self.trainers if any(module is model for module in trainer.model.modules())]
        return inside([trainer.accumulate() for trainer in own])

    def clip_grad_norm_(self, parameters: Iterable[Tensor], max_norm: float, norm_type: int = 2) -> Tensor | None:
        """Return the norm of the summed gradient, which is known, and clipped, when the optimizer has made its step."""
        if norm_type != 2:
            raise UsageError(f"clip_grad_norm_ knows the 2-norm only, not norm_type={norm_type}")
        if max_norm != torch.inf:  # else only the norm is wanted
            check_norm(max_norm, self._max_grad_norm, "Accelerator")
        return None if self._max_grad_norm is None else self._grad_norm

    # --- between workers

    def gather(self, tensor: Any) -> Any:
        """Return the tensors of all workers, concatenated."""
        return recursively_apply(self.workers.concatenate, tensor, error_on_other_type=True)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Return the tensors of all workers, without the samples that were repeated to fill the last batch."""
        if use_gather_object:
            raise UsageError("gather_for_metrics takes tensors; leave out use_gather_object (eval_use_gather_object)")
        recursively_apply(lambda one: one, input_data, error_on_other_type=True)
        return super().gather_for_metrics(input_data)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Return the sum, mean or maximum over all workers."""
        if reduction == "none":
            return tensor
        return recursively_apply(lambda own: self.workers.all_reduce(own, reduction) * scale, tensor)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Pad tensors to the largest size that any worker has."""
        pad = partial(self.workers.pad, dim=dim, filler=pad_index, at_start=pad_first)
        return recursively_apply(pad, tensor, error_on_other_type=True)

    def wait_for_everyone(self) -> None:
        """Wait for all workers. The models then have the updates of all of them."""
        meet(self.trainers, self.workers)

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Let worker 0 run the block before the others."""
        if not self.is_main_process:
            self.workers.barrier()
        yield
        if self.is_main_process:
            self.workers.barrier()

    local_main_process_first = main_process_first

    def load_state(self, *args: Any, **kwargs: Any) -> None:
        """Load models, optimizers and schedules. All workers call it."""
        with inside([trainer.edit_weights() for trainer in self.trainers]):
            super().load_state(*args, **kwargs)

    def end_training(self) -> None:
        """Wait for the other workers, let the models have the updates of all, and end the trackers."""
        finish(self.trainers)
        for tracker in self.trackers:
            tracker.finish()
