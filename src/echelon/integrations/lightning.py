"""A Lightning strategy over stores: one more argument of Lightning's Trainer.

    trainer = lightning.Trainer(strategy=EchelonStrategy("dist_sync"), accelerator="cpu", devices=1)

Each worker of the job is one process with one device. Lightning divides the data, logs, validates and saves as under
its own strategies. Every optimizer gets an `echelon.Trainer`, so its `step` sends the gradients and its state is the
store's.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch import Trainer as LightningTrainer
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torchmetrics import Metric

from echelon.errors import UsageError
from echelon.integrations.workers import Workers, check_norm, finish, inside
from echelon.schemes.stores import store_kind
from echelon.train.trainer import Trainer


class EchelonStrategy(ParallelStrategy):
    """`kvstore` and the options are those of `echelon.Trainer`."""

    def __init__(self, kvstore: str = "dist_sync", **options: Any) -> None:
        super().__init__(cluster_environment=LightningEnvironment())
        self._kind = store_kind(kvstore)
        self._options = {"kvstore": kvstore, **options}
        self._trainers: list[Trainer] = []
        self._workers: Workers | None = None

    # --- ranks and devices

    @property
    def workers(self) -> Workers:
        """All workers of the job. This process joins the job when Lightning first asks for its rank."""
        if self._workers is None:
            self._workers = Workers(self._kind.name)
            rank_zero_only.rank = self._workers.rank
        return self._workers

    def set_world_ranks(self) -> None:
        """Join the job. Lightning calls it when its Trainer is created."""
        _ = self.workers

    @property
    def global_rank(self) -> int:
        return self.workers.rank

    @property
    def local_rank(self) -> int:
        return self.workers.rank % len(self.parallel_devices)

    @property
    def world_size(self) -> int:
        return self.workers.count

    @property
    def is_distributed(self) -> bool:
        """Whether Lightning's samplers divide the data."""
        return self.world_size > 1

    @property
    def root_device(self) -> torch.device:
        device: torch.device = self.parallel_devices[self.local_rank]
        return device

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def model_to_device(self) -> None:
        self.model.to(self.root_device)

    # --- training

    def setup(self, trainer: LightningTrainer) -> None:
        """Prepare the model, its metrics and its optimizers."""
        super().setup(trainer)
        for module in self.lightning_module.modules():
            if isinstance(module, Metric):
                module.distributed_available_fn = lambda: self.world_size > 1
                module.dist_sync_fn = lambda tensor, group=None: self.workers.gather(tensor)
        if trainer.state.fn == TrainerFn.FITTING:
            options = self._options | self._clipping(trainer)
            self._trainers = [Trainer(self.lightning_module, optimizer, **options) for optimizer in self.optimizers]

    def _clipping(self, trainer: LightningTrainer) -> dict[str, float]:
        """Return the option that clips the summed gradient as Lightning is asked to clip each worker's."""
        norm = trainer.gradient_clip_val if trainer.gradient_clip_algorithm != "value" else None
        limit = norm or self._options.get("max_grad_norm")
        self.precision_plugin.clip_grad_by_norm = lambda _, clip_val: check_norm(clip_val, limit, "EchelonStrategy")
        return {} if limit is None else {"max_grad_norm": limit}

    def on_train_start(self) -> None:
        """Check that all workers make the same number of steps, if they wait for each other."""
        counts = self.workers.gather(self.lightning_module.trainer.num_training_batches)
        if len(set(counts)) > 1 and self._kind.scheme != "ASP":
            raise UsageError(
                f"the workers have {counts} batches per epoch, but those of {self._kind.name} wait for each other; use "
                f"Trainer(limit_train_batches={min(counts)}), or dist_async"
            )

    def block_backward_sync(self) -> AbstractContextManager[object]:
        """Only add to the gradients inside."""
        return inside([trainer.accumulate() for trainer in self._trainers])

    def on_train_end(self) -> None:
        """Wait for the other workers, and let the model have the updates of all."""
        finish(self._trainers)

    # --- values of all workers

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        if not isinstance(tensor, Tensor):
            return tensor
        name = "sum" if reduce_op is None else str(reduce_op).rpartition(".")[2].lower()
        return self.workers.all_reduce(tensor, {"avg": "mean"}.get(name, name))

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        if sync_grads and tensor.requires_grad:
            raise UsageError("all_gather(sync_grads=True) is not possible: stores do not send gradients of values")
        return torch.stack(self.workers.gather(tensor))

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return self.workers.gather(obj)[src]

    def barrier(self, name: str | None = None) -> None:
        self.workers.barrier()
