"""Trains with Accelerate, in several ways, and saves what each worker has at the end.

    python accelerate_program.py STORE OUT CASE…

STORE is the name of a store, or "none" for Accelerate itself, which uses DDP if torchrun's variables are set. OUT gets
one file per worker.
"""

import sys
import warnings
from pathlib import Path
from typing import Any

import accelerate
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from echelon.integrations.accelerate import Accelerator

BATCH, SAMPLES, CLASSES = 3, 40, 4  # the last batches are filled up
MAX_NORM = 0.05


def make_data() -> TensorDataset:
    inputs = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(3))
    return TensorDataset(inputs, inputs[:, :CLASSES].argmax(1))


class Stream(IterableDataset[Any]):
    """The same samples without a length."""

    def __iter__(self) -> Any:
        return iter(make_data())


class Run:
    """A loop as Accelerate's documentation shows it."""

    def __init__(self, accelerator: accelerate.Accelerator, data: Any = None, *, adam: bool = True) -> None:
        self.accelerator = accelerator
        torch.manual_seed(7)
        model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, CLASSES))
        optimizer = torch.optim.AdamW(model.parameters(), 0.02) if adam else torch.optim.SGD(model.parameters(), 0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 10))
        loader = DataLoader(make_data(), BATCH, shuffle=True) if data is None else DataLoader(data, BATCH)
        prepared = accelerator.prepare(model, optimizer, loader, schedule)
        self.model, self.optimizer, self.loader, self.schedule = prepared
        self.losses: list[float] = []
        self.norms: list[Tensor] = []

    def epoch(self, max_norm: float | None = None) -> None:
        for inputs, labels in self.loader:
            with self.accelerator.accumulate(self.model):
                loss = cross_entropy(self.model(inputs), labels)
                self.accelerator.backward(loss)
                if max_norm is not None and self.accelerator.sync_gradients:
                    norm = self.accelerator.clip_grad_norm_(self.model.parameters(), max_norm)
                self.optimizer.step()
                if max_norm is not None and self.accelerator.sync_gradients:
                    self.norms.append(norm.clone())
                self.schedule.step()
                self.optimizer.zero_grad()
            self.losses.append(self.accelerator.reduce(loss.detach(), "mean").item())

    def accuracy(self) -> dict[str, float]:
        loader = self.accelerator.prepare(DataLoader(make_data(), 4))
        right = []
        for inputs, labels in loader:
            with torch.no_grad():
                found = self.model(inputs).argmax(1)
            right += self.accelerator.gather_for_metrics(found == labels).tolist()
        return {"accuracy": sum(right) / len(right), "samples": float(len(right))}

    def result(self) -> dict[str, Any]:
        self.accelerator.wait_for_everyone()
        model = self.accelerator.unwrap_model(self.model)
        norms = [float(norm) for norm in self.norms]
        return {"weights": model.state_dict(), "metrics": self.accuracy(), "losses": self.losses, "norms": norms}


class Case:
    def __init__(self, store: str, folder: Path) -> None:
        self._store, self._folder = store, folder

    def accelerator(self, max_grad_norm: float | None = None, **options: Any) -> accelerate.Accelerator:
        if self._store == "none":
            return accelerate.Accelerator(cpu=True, **options)
        return Accelerator(cpu=True, kvstore=self._store, max_grad_norm=max_grad_norm, **options)

    def plain(self) -> Run:
        run = Run(self.accelerator())
        run.epoch()
        run.epoch()
        return run

    def clipped(self) -> Run:
        run = Run(self.accelerator(MAX_NORM), adam=False)
        run.epoch(MAX_NORM)
        return run

    def clipped_by_hand(self) -> Run:
        """Clips what Accelerate cannot clip: the store sums the gradients later."""
        run = Run(self.accelerator(), adam=False)
        run.epoch(MAX_NORM)
        return run

    def accumulated(self) -> Run:
        run = Run(self.accelerator(gradient_accumulation_steps=2))
        run.epoch()
        return run

    def stream(self) -> Run:
        loading = accelerate.DataLoaderConfiguration(dispatch_batches=False)
        run = Run(self.accelerator(dataloader_config=loading), Stream())
        run.epoch()
        return run

    def restored(self) -> Run:
        """Goes back to the end of the first epoch, after a second one."""
        run = Run(self.accelerator())
        run.epoch()
        run.accelerator.save_state(str(self._folder / "state"))
        run.epoch()
        run.accelerator.wait_for_everyone()
        run.accelerator.load_state(str(self._folder / "state"))
        run.epoch()
        return run


def main(store: str, folder: Path, cases: list[str]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    results = {}
    rank = 0
    for case in cases:
        run: Run = getattr(Case(store, folder), case)()
        rank = run.accelerator.process_index
        results[case] = run.result()
        if store != "none":
            run.accelerator.end_training()
    torch.save(results, folder / f"{rank}.pt")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
