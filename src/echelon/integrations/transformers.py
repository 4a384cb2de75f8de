"""Hugging Face's Trainer over a store: a script changes its import of `Trainer`, and names the store.

    from echelon.integrations.transformers import Trainer

    trainer = Trainer(model, args, train_dataset=data, kvstore="dist_sync")
    trainer.train()

The workers divide each epoch, evaluate together, and worker 0 saves. `TrainingArguments.max_grad_norm` limits the norm
of the summed gradient. Everything else is the work of `echelon.integrations.accelerate`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import transformers
from torch import Tensor

from echelon.errors import UsageError
from echelon.integrations.accelerate import Accelerator
from echelon.integrations.workers import finish


class Trainer(transformers.Trainer):
    """`kvstore` and `trainer_options` are those of `echelon.Trainer`."""

    accelerator: Accelerator

    def __init__(
        self, *args: Any, kvstore: str = "dist_sync", trainer_options: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        self._store_options: dict[str, Any] = {"kvstore": kvstore, "trainer_options": trainer_options}
        super().__init__(*args, **kwargs)

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        args: dict[str, Any] = super()._build_accelerator_args(**kwargs)
        self._accelerator_args = args
        return args

    def create_accelerator_and_postprocess(self) -> None:
        """Replace Accelerate's Accelerator by one whose workers are those of the job."""
        if self.args.n_gpu > 1:
            raise UsageError(
                f"this worker sees {self.args.n_gpu} GPUs, which Hugging Face's Trainer would use all; set "
                "CUDA_VISIBLE_DEVICES to one GPU per worker"
            )
        super().create_accelerator_and_postprocess()
        norm = self.args.max_grad_norm or None
        self.accelerator = Accelerator(**self._accelerator_args, **self._store_options, max_grad_norm=norm)
        gather = self.accelerator.gather_for_metrics
        self.gather_function = partial(gather, use_gather_object=self.args.eval_use_gather_object)
        if not self.accelerator.workers.lock_step:
            self.args.average_tokens_across_devices = False  # workers would wait for each other in every step

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train, and wait for the other workers. The model then has the updates of all."""
        output = super().train(*args, **kwargs)
        finish(self.accelerator.trainers)
        return output

    def _load_best_model(self) -> None:
        finish(self.accelerator.trainers)  # or it would replace the best weights by the last ones
        super()._load_best_model()

    def _maybe_log_save_evaluate(self, tr_loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Log the mean of the workers' losses, if they are at the same step."""
        logs = self.control.should_log and self.state.global_step > self._globalstep_last_logged
        if logs and self.accelerator.workers.lock_step:
            tr_loss.copy_(self.accelerator.reduce(tr_loss, "mean"))
        super()._maybe_log_save_evaluate(tr_loss, *args, **kwargs)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self.args.should_save and any(trainer.shards_optimizer for trainer in self.accelerator.trainers):
            self.optimizer.state_dict()  # each worker has a part of it, and all must call this
        super()._save_optimizer_and_scheduler(output_dir)
