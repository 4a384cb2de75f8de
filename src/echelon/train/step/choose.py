"""Chooses the engine that runs the steps of a run, with the reason, and makes the step.

`eager`: the host launches every kernel. `graph`: the whole step is captured once as a CUDA graph and replayed.
`compile`: Inductor generates the kernels (about a minute at the start; the result is cached for the next run), and the
step is captured as well where that is possible. `auto` on a GPU captures the step at once and compiles it beside the
training (`loop.compile_beside`), if the rest of the run is long enough. A step that cannot be captured is compiled at
the start, if the run has many steps.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from echelon.train.recipe.options import TrainOptions
from echelon.train.recipe.pace import Pacer
from echelon.train.recipe.plan import ProcessRank
from echelon.train.step.average import MovingAverage
from echelon.train.step.captured import CapturedStep, make_capturable, why_not_capturable
from echelon.train.step.captured_with_servers import CapturedServerStep, why_not_capturable_with_servers
from echelon.train.step.eager import EagerStep, ForwardPass
from echelon.train.step.losses import Mixup
from echelon.train.step.precision import LossScaler, Precision
from echelon.train.trainer.base import Trainer
from echelon.train.trainer.servers.trainer import ServerTrainer

log = logging.getLogger(__name__)

COMPILING_PAYS_AFTER = 5_000  # steps: compiling costs about a minute and saves about 1 to 5 ms per step
REMIND_S = 20.0


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """Whether steps are captured, whether they are compiled from the start or later beside the training, and why."""

    captured: bool
    compiled: bool
    reason: str
    compiles_beside: bool = False

    @property
    def name(self) -> str:
        """The value of `--engine` that means this choice."""
        return "compile" if self.compiled else "graph" if self.captured else "eager"

    def __str__(self) -> str:
        how = {"compile": "compiled, then captured" if self.captured else "compiled"}.get(self.name, self.name)
        return f"engine {how}: {self.reason}"


def choose_engine(
    options: TrainOptions, trainer: Trainer, precision: Precision, place: ProcessRank, num_steps: int
) -> EngineChoice:
    """Choose the engine of a run of `num_steps` steps."""
    obstacle = _obstacle(options, trainer, precision, place)
    return decide_engine(options.engine, precision.device.type, obstacle, num_steps)


def decide_engine(requested: str, device: str, obstacle: str | None, num_steps: int) -> EngineChoice:
    """Decide from the value of `--engine`; `obstacle` says why a step cannot be captured, or is None."""
    on_gpu = device == "cuda"
    if not on_gpu:
        obstacle = "CUDA graphs need a GPU and this run is on the CPU"
    capturable = obstacle is None
    if requested == "eager":
        return EngineChoice(False, False, "set by --engine")
    if requested in ("graph", "compile"):
        reason = f"not captured because {obstacle}" if obstacle else "set by --engine"
        return EngineChoice(capturable, requested == "compile", reason)
    if not on_gpu:
        return EngineChoice(False, False, "on a CPU the kernels take much longer than launching them")
    if capturable:
        reason = "captured at once, and compiled beside the training if that takes long enough"
        return EngineChoice(True, False, reason, compiles_beside=True)
    long = num_steps >= COMPILING_PAYS_AFTER
    steps = f"{num_steps:,} steps are {'enough' if long else 'too few'} to pay for compiling"
    return EngineChoice(False, long, f"{steps}; not captured because {obstacle}")


def _obstacle(options: TrainOptions, trainer: Trainer, precision: Precision, place: ProcessRank) -> str | None:
    """Return why the steps of this run cannot be captured, or None."""
    with_servers = isinstance(trainer, ServerTrainer)
    if with_servers and precision.half is torch.float16:
        return "float16 gradients are checked for overflow before they are sent to the servers"
    if not trainer.capturable and not with_servers:
        return f"{trainer.kvstore.type} with {place.size} processes communicates in every step"
    if options.monitor:
        return "--monitor reads values inside the step"
    if options.mixup:
        return "--mixup draws random numbers on the host"
    if options.pace.seconds:
        return "--pace waits inside the step"
    if isinstance(trainer, ServerTrainer):
        return why_not_capturable_with_servers(trainer)
    return why_not_capturable(trainer.optimizer, precision.half)


def prepare_optimizer(choice: EngineChoice, trainer: Trainer, precision: Precision, scaler: LossScaler | None) -> None:
    """Move the optimizer's state to the device if steps are captured. Call it before a checkpoint is loaded."""
    if choice.captured and not isinstance(trainer, ServerTrainer):
        make_capturable(trainer.optimizer, precision.device, scaler)


def make_step(
    choice: EngineChoice,
    options: TrainOptions,
    forward_pass: ForwardPass,
    trainer: Trainer,
    scaler: LossScaler | None,
    average: MovingAverage | None,
    first_step: int = 0,
) -> CapturedStep | CapturedServerStep | EagerStep:
    """Make the step that was chosen. `first_step` is the number of steps that earlier processes of the run made."""
    if choice.captured and isinstance(trainer, ServerTrainer):
        return CapturedServerStep(forward_pass, trainer, compiled=choice.compiled, average=average)
    if choice.captured:
        return CapturedStep(forward_pass, trainer, scaler, compiled=choice.compiled, average=average)
    rank = trainer.kvstore.rank
    mixup = Mixup(options.mixup, options.seed, rank, first_step) if options.mixup else None
    pacer = Pacer(options.pace, trainer.kvstore.worker_rank)
    return EagerStep(forward_pass, trainer, scaler, pacer, compiled=choice.compiled, mixup=mixup, average=average)


@contextmanager
def log_duration(what: str) -> Iterator[None]:
    """Log that a long operation has started, every `REMIND_S` that it still runs, and how long it took."""
    began, done = time.monotonic(), threading.Event()

    def remind() -> None:
        while not done.wait(REMIND_S):
            log.info("still %s, %.0f s", what, time.monotonic() - began)

    log.info("%s …", what)
    thread = threading.Thread(target=remind, name="log-duration", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        log.info("%s took %.0f s", what, time.monotonic() - began)
