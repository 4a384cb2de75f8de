"""Trains with Lightning, in several ways, and saves what each worker has at the end.

    python lightning_program.py STRATEGY OUT CASE…

STRATEGY is Lightning's ("auto", "ddp…") or the name of a store. OUT gets one file per worker.
"""

import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from echelon.integrations.lightning import EchelonStrategy

BATCH, SAMPLES, CLASSES = 3, 42, 4  # seven batches for each of two workers
MAX_NORM = 0.05


class Classifier(lightning.LightningModule):
    """Logs a mean over workers and a metric object."""

    def __init__(self, learning_rate: float = 0.05, *, adam: bool = False) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, CLASSES))
        self.accuracy = MulticlassAccuracy(CLASSES, average="micro")
        self.learning_rate, self.adam = learning_rate, adam
        self.fails_at: int | None = None  # the batch in which worker 1 fails

    def training_step(self, batch: list[Tensor], index: int) -> Tensor | None:
        if index == self.fails_at and self.global_rank == 1:
            raise RuntimeError("the third batch is broken")
        return cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        logits = self.net(batch[0])
        self.accuracy.update(logits, batch[1])
        self.log("accuracy", self.accuracy)
        self.log("loss", cross_entropy(logits, batch[1]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        if self.adam:
            return torch.optim.Adam(self.net.parameters(), self.learning_rate)
        optimizer = torch.optim.SGD(self.net.parameters(), self.learning_rate, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Adversaries(Classifier):
    """Two optimizers, which the module steps itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.noise = nn.Linear(6, 6)

    def training_step(self, batch: list[Tensor], index: int) -> None:
        first, second = self.optimizers()
        for optimizer, sign in ((first, 1.0), (second, -0.1)):
            self.toggle_optimizer(optimizer)
            loss = sign * cross_entropy(self.net(batch[0] + self.noise(batch[0])), batch[1])
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), 0.05), torch.optim.Adam(self.noise.parameters(), 0.01)


def data(seed: int = 3, samples: int = SAMPLES) -> DataLoader[Any]:
    """Return inputs whose class depends on the largest of four values."""
    inputs = torch.randn(samples, 6, generator=torch.Generator().manual_seed(seed))
    return DataLoader(TensorDataset(inputs, inputs[:, :CLASSES].argmax(1)), BATCH, shuffle=seed == 3)


class Case:
    """One training: the module, and the arguments of Lightning's Trainer."""

    def __init__(self, strategy: str, folder: Path) -> None:
        self._strategy, self._folder = strategy, folder

    def trainer(self, epochs: int = 2, **options: Any) -> lightning.Trainer:
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        return lightning.Trainer(
            accelerator="cpu",
            devices=2 if self._strategy.startswith("ddp") else 1,
            strategy=strategy_of(self._strategy),
            max_epochs=epochs,
            default_root_dir=self._folder,
            enable_checkpointing=False,
            num_sanity_val_steps=0,
            **quiet,
            **options,
        )

    def plain(self) -> lightning.Trainer:
        return self.fitted(Classifier())

    def clipped(self) -> lightning.Trainer:
        return self.fitted(Classifier(), gradient_clip_val=MAX_NORM)

    def accumulated(self) -> lightning.Trainer:
        return self.fitted(Classifier(), accumulate_grad_batches=2)

    def bfloat16(self) -> lightning.Trainer:
        return self.fitted(Classifier(), precision="bf16-mixed")

    def adversaries(self) -> lightning.Trainer:
        return self.fitted(Adversaries())

    def adam(self) -> lightning.Trainer:
        return self.fitted(Classifier(0.02, adam=True))

    def resumed(self) -> lightning.Trainer:
        first = self.fitted(Classifier(0.02, adam=True), epochs=1)
        path = self._folder / "resumed.ckpt"
        first.save_checkpoint(path)
        torch.manual_seed(99)  # the checkpoint must give the weights
        second = self.trainer()
        second.fit(Classifier(0.02, adam=True), data(), data(4), ckpt_path=path, weights_only=False)
        return second

    def uneven(self) -> lightning.Trainer:
        trainer = self.trainer(use_distributed_sampler=False)
        trainer.fit(Classifier(), data(samples=12 + 6 * trainer.global_rank))
        return trainer

    def broken(self) -> lightning.Trainer:
        """Worker 1 fails in its third step."""
        module = Classifier()
        module.fails_at = 2
        return self.fitted(module)

    def fitted(self, module: lightning.LightningModule, **options: Any) -> lightning.Trainer:
        trainer = self.trainer(**options)
        trainer.fit(module, data(), data(4))
        return trainer


def strategy_of(name: str) -> Strategy | str:
    """Return Lightning's own strategy, or that of a store. A strategy belongs to one Trainer of Lightning."""
    return name if name.startswith(("auto", "ddp")) else EchelonStrategy(name)


def main(name: str, folder: Path, cases: list[str]) -> None:
    for source in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(source).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    results = {}
    rank = 0
    for case in cases:
        torch.manual_seed(7)
        trainer: lightning.Trainer = getattr(Case(name, folder), case)()
        rank = trainer.global_rank
        weights = {key: value.detach().clone() for key, value in trainer.lightning_module.state_dict().items()}
        metrics = {key: float(value) for key, value in trainer.callback_metrics.items()}
        results[case] = {"weights": weights, "metrics": metrics, "steps": [trainer.global_step]}
    torch.save(results, folder / f"{rank}.pt")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
