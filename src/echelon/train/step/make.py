"""Putting a run's engine together: what stands in the way of the fastest one, and the step it comes to."""

from __future__ import annotations

import torch

from echelon.train.recipe.options import TrainOptions
from echelon.train.recipe.pace import Pacer
from echelon.train.recipe.plan import Place
from echelon.train.step.average import MovingAverage
from echelon.train.step.captured import CapturedStep, make_capturable, why_not_captured
from echelon.train.step.captured_with_servers import ServedStep, why_not_served
from echelon.train.step.choose import Choice, choose_engine
from echelon.train.step.eager import EagerStep, Mixup, Work
from echelon.train.step.precision import LossScaler, Precision
from echelon.train.trainer.base import Trainer
from echelon.train.trainer.server import ServerTrainer


def choose(options: TrainOptions, trainer: Trainer, precision: Precision, place: Place, num_steps: int) -> Choice:
    """The engine of a run."""
    obstacle = _obstacle(options, trainer, precision, place)
    return choose_engine(options.engine, precision.device.type, obstacle, num_steps)


def _obstacle(options: TrainOptions, trainer: Trainer, precision: Precision, place: Place) -> str | None:
    """What keeps this run's steps from being captured, or None."""
    served = isinstance(trainer, ServerTrainer)
    if served and precision.half is torch.float16:
        return "float16's gradients are looked at before they leave for the servers"
    if not trainer.capturable and not served:
        return f"{trainer.kvstore.type} with {place.size} processes meets others in every step"
    if options.monitor:
        return "--monitor looks into steps"
    if options.mixup:
        return "--mixup draws on the host"
    if options.pace.seconds:
        return "--pace waits inside the step"
    if isinstance(trainer, ServerTrainer):
        return why_not_served(trainer)
    return why_not_captured(trainer.optimizer, precision.half)


def prepare(choice: Choice, trainer: Trainer, precision: Precision, scaler: LossScaler | None) -> None:
    """Before a checkpoint is loaded: an optimizer that is captured keeps all of its state on the device."""
    if choice.captured and not isinstance(trainer, ServerTrainer):
        make_capturable(trainer.optimizer, precision.device, scaler)


def make_step(
    choice: Choice,
    options: TrainOptions,
    work: Work,
    trainer: Trainer,
    scaler: LossScaler | None,
    average: MovingAverage | None,
    begin: int = 0,
) -> CapturedStep | ServedStep | EagerStep:
    """The step that was chosen; the first one is number `begin` of the run."""
    if choice.captured and isinstance(trainer, ServerTrainer):
        return ServedStep(work, trainer, compiled=choice.compiled, average=average)
    if choice.captured:
        return CapturedStep(work, trainer, scaler, compiled=choice.compiled, average=average)
    rank = trainer.kvstore.rank
    mixup = Mixup(options.mixup, options.seed, rank, begin) if options.mixup else None
    pacer = Pacer(options.pace, trainer.kvstore.worker_rank)
    return EagerStep(work, trainer, scaler, pacer, compiled=choice.compiled, mixup=mixup, average=average)
