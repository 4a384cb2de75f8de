"""Trains with Hugging Face's Trainer, in several ways, and saves what each worker has at the end.

    python transformers_program.py STORE OUT CASE…

STORE is the name of a store, or "none" for transformers.Trainer itself, which uses DDP if torchrun's variables are set.
OUT gets one file per worker.
"""

import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, EvalPrediction, TrainingArguments

from echelon.integrations.transformers import Trainer

BATCH, SAMPLES, CLASSES, LENGTH = 3, 42, 3, 8  # seven batches for each of two workers
MAX_NORM = 0.1


class Texts(Dataset[dict[str, Tensor]]):
    """Texts of random tokens, whose class depends on the first."""

    def __init__(self, seed: int, samples: int = SAMPLES) -> None:
        self._tokens = torch.randint(0, 32, (samples, LENGTH), generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self._tokens[index], "labels": self._tokens[index, 0] % CLASSES}


def make_model(dropout: float = 0.0) -> BertForSequenceClassification:
    """Return a tiny model with random weights."""
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=32,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=32,
            max_position_embeddings=LENGTH,
            num_labels=CLASSES,
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
        )
    )


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    found = np.argmax(prediction.predictions, axis=1)
    return {"accuracy": float(np.mean(found == prediction.label_ids)), "samples": float(len(found))}


class Case:
    """One training."""

    def __init__(self, store: str, folder: Path) -> None:
        self._store, self._folder = store, folder

    def trainer(self, name: str, *, dropout: float = 0.0, **options: Any) -> transformers.Trainer:
        settings = {"max_grad_norm": 0.0, "num_train_epochs": 2, "save_strategy": "no", "learning_rate": 5e-3} | options
        arguments = TrainingArguments(
            str(self._folder / name),
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            logging_steps=2,
            per_device_train_batch_size=BATCH,
            per_device_eval_batch_size=4,
            **settings,
        )
        torch.manual_seed(7)
        given: dict[str, Any] = {"train_dataset": Texts(3), "eval_dataset": Texts(4, 21), "compute_metrics": accuracy}
        if self._store == "none":
            return transformers.Trainer(make_model(dropout), arguments, **given)
        return Trainer(make_model(dropout), arguments, **given, kvstore=self._store)

    def plain(self) -> transformers.Trainer:
        return self.trained("plain")

    def clipped(self) -> transformers.Trainer:
        return self.trained("clipped", max_grad_norm=MAX_NORM)

    def accumulated(self) -> transformers.Trainer:
        return self.trained("accumulated", gradient_accumulation_steps=2)

    def bfloat16(self) -> transformers.Trainer:
        return self.trained("bfloat16", bf16=True)

    def interrupted(self) -> transformers.Trainer:
        """Saves after the fifth step, and continues in a new Trainer. Dropout needs the random state, too."""
        self.trained("interrupted", dropout=0.1, save_strategy="steps", save_steps=5)
        second = self.trainer("interrupted", dropout=0.1)
        torch.nn.init.zeros_(second.model.classifier.weight)  # the checkpoint must give the weights
        second.train(resume_from_checkpoint=str(self._folder / "interrupted" / "checkpoint-5"))
        return second

    def uninterrupted(self) -> transformers.Trainer:
        return self.trained("uninterrupted", dropout=0.1)

    def best(self) -> transformers.Trainer:
        """Ends with the weights of the best epoch, which is not the last one."""
        often = {"eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True}
        return self.trained("best", **often, metric_for_best_model="samples", greater_is_better=True)

    def trained(self, name: str, **options: Any) -> transformers.Trainer:
        trainer = self.trainer(name, **options)
        trainer.train()
        return trainer


def main(store: str, folder: Path, cases: list[str]) -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    results = {}
    rank = 0
    for case in cases:
        trainer: transformers.Trainer = getattr(Case(store, folder), case)()
        rank = trainer.args.process_index
        weights = {key: value.detach().clone() for key, value in trainer.model.state_dict().items()}
        measured = trainer.evaluate()
        clips = trainer.args.max_grad_norm > 0  # otherwise Echelon does not compute the norm
        results[case] = {
            "weights": weights,
            "metrics": {key: measured[f"eval_{key}"] for key in ("loss", "accuracy", "samples")},
            "steps": [trainer.state.global_step],
            "losses": [row["loss"] for row in trainer.state.log_history if "loss" in row],
            "norms": [row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row and clips],
        }
    torch.save(results, folder / f"{rank}.pt")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
