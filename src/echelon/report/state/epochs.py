"""The figures of a run by epoch: means over the workers, as MXNet's parse_log has them, and speeds, which are sums."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from echelon.report.state.run import Event, RunState


@dataclass(frozen=True, slots=True)
class EpochRow:
    """One epoch, from 1. `seconds` is the time of the training steps; None: not measured."""

    epoch: int
    train_accuracy: float | None
    valid_accuracy: float | None
    seconds: float | None
    samples_per_s: float | None  # of all workers together


def epoch_rows(state: RunState) -> list[EpochRow]:
    """Return the epochs that at least one worker has completed, or that were validated."""
    validated = {event["epoch"]: event["accuracy"] for event in state.validations}
    whole = {int(epoch) for epoch in validated if epoch == int(epoch) and epoch > 0}
    return [
        _row(number, list(state.epochs.get(number, {}).values()), validated.get(number))
        for number in sorted(whole | set(state.epochs))
    ]


def _row(number: int, workers: list[Event], valid_accuracy: float | None) -> EpochRow:
    measured = [event["metrics"].get("accuracy") for event in workers]
    accuracies = [accuracy for accuracy in measured if accuracy is not None]  # JSON has null for nan
    rates = [event["samples"] / event["seconds"] for event in workers if event["seconds"]]
    return EpochRow(
        number,
        statistics.fmean(accuracies) if accuracies else None,
        valid_accuracy,
        statistics.fmean(event["seconds"] for event in workers) if workers else None,
        sum(rates) if rates else None,
    )
