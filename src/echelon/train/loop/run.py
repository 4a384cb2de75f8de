"""One process's way through a run: epochs, steps, lines, evaluations, checkpoints, and the end.

How a step runs is the engine's matter, who waits for whom the trainer's. The words are MXNet's; the events are what
`echelon train` shows.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import closing, nullcontext
from pathlib import Path

import torch

from echelon.data.loading.loader import Batches
from echelon.data.sets.datasets import Dataset
from echelon.environment import use_compile_cache
from echelon.train import log_lines
from echelon.train.checkpoint import run_directory as checkpoint
from echelon.train.checkpoint.saver import Point, Saver
from echelon.train.loop.evaluate import Validation
from echelon.train.loop.inputs import train_loader
from echelon.train.loop.monitor import Monitor
from echelon.train.loop.progress import TrainingProgress
from echelon.train.loop.stopping import STOPS as STOPS
from echelon.train.loop.stopping import Interrupted, Stopping
from echelon.train.loop.tensorboard import Board
from echelon.train.recipe.options import TrainOptions
from echelon.train.recipe.plan import Place, epoch_size, sampling_for, schedule_for, state_at
from echelon.train.step.average import MovingAverage
from echelon.train.step.captured import set_learning_rate
from echelon.train.step.choose import choose_engine, log_duration, make_step, prepare_optimizer
from echelon.train.step.eager import ForwardPass
from echelon.train.step.metrics import Metrics
from echelon.train.step.precision import LossScaler, choose_precision
from echelon.train.trainer.base import Trainer

log = logging.getLogger(__name__)


class Run:
    """One process's training."""

    def __init__(
        self,
        options: TrainOptions,
        dataset: Dataset,
        trainer: Trainer,
        device: torch.device,
        run_dir: str | None,
        device_index: int,
        progress: TrainingProgress | None,
    ) -> None:
        kvstore = trainer.kvstore
        self._options = options
        self._dataset = dataset
        self._trainer = trainer
        self._kvstore = kvstore
        self._events = kvstore.events
        self._run_dir = run_dir
        workers = kvstore.workers
        self._place = Place(workers.index(kvstore.rank), len(workers), len(options.devices))
        self._leader = self._place.rank == 0
        self._speaks = device_index == 0
        self._metrics = Metrics(options.top_k, options.loss)
        self._evaluation_metrics = self._metrics.with_cross_entropy()
        self._precision = choose_precision(options.dtype, device)
        self._scaler = LossScaler(device) if self._precision.half is torch.float16 else None
        examples = min(options.num_examples or len(dataset.train), len(dataset.train))
        num_steps = options.num_epochs * epoch_size(examples, self._place.num_workers, options.batch_size)
        self._choice = choose_engine(options, trainer, self._precision, self._place, num_steps)
        self._sampling = sampling_for(options, len(dataset.train), self._place, fixed=self._fixed)
        self._per_epoch = self._sampling.batches_per_epoch
        self._forward_pass = ForwardPass(
            trainer.model, self._precision, self._metrics, self._sampling.batch_size, options.label_smoothing
        )
        horizon = options.ema_epochs * self._per_epoch
        self._average = MovingAverage(trainer.model, horizon) if horizon and self._leader else None
        self._saver = Saver(options, self._place, trainer, dataset, self._scaler, self._average)
        self._validation = (
            Validation(dataset.validation, dataset.augment, device, options.data_nthreads, options.skip_bad_records)
            if dataset.validation is not None and self._leader
            else None
        )
        self._monitor = Monitor(trainer.model, options.monitor) if options.monitor else None
        self._board = Board.open(options.tensorboard if self._leader else None)
        self._progress = progress
        self._began = 0.0
        self._measured: dict[str, float] = {}
        self._reached = False
        self._stopping = Stopping()

    @property
    def _fixed(self) -> bool:
        """Whether all steps are of one size, and all processes make as many."""
        return self._choice.captured or self._choice.compiled or (self._place.size > 1 and self._trainer.lock_step)

    # --- training

    def run(self) -> int:
        """Train, meet the others, and as the leader evaluate and save what came out."""
        prepare_optimizer(self._choice, self._trainer, self._precision, self._scaler)
        point = self._saver.load()
        state = state_at(self._sampling, point.epoch, point.samples_done, self._place.size)
        self._schedule = schedule_for(self._options, self._place, self._per_epoch, point.epoch)
        begin = state.epoch * self._per_epoch + state.position // self._sampling.batch_size
        self._step = make_step(
            self._choice, self._options, self._forward_pass, self._trainer, self._scaler, self._average, begin
        )
        device = self._precision.device
        with (
            closing(train_loader(self._options, self._dataset, self._sampling, device, state)) as loader,
            self._stopping.noting(),
        ):
            self._tell()
            self._kvstore.barrier()
            self._began = time.monotonic()
            self._events.write("begin", rank=self._kvstore.worker_rank, batches_per_epoch=self._per_epoch)
            if loader.state.epoch >= self._options.num_epochs:
                self._say(
                    f"nothing is left to train: {loader.state.epoch} epochs of --num-epochs {self._options.num_epochs}"
                )
            try:
                while loader.state.epoch < self._options.num_epochs and not self._kvstore.halted:
                    self._train_epoch(loader)
            except Interrupted as stop:
                return self._leave(str(stop))
            self._finish()
        return STOPS.get(self._kvstore.halted or "", 0)

    def _train_epoch(self, loader: Batches) -> None:
        epoch, per_epoch = loader.state.epoch, self._per_epoch
        first = loader.state.position // self._sampling.batch_size
        speedometer = log_lines.Speedometer(self._options.batch_size, self._options.disp_batches)
        self._forward_pass.sums.zero_()
        shown = torch.zeros(len(self._forward_pass.sums), dtype=torch.float64)
        began = time.perf_counter()
        self._trainer.model.train()
        for index in self._steps(loader, first):
            if index % self._options.disp_batches == 0 or index == first:
                now = self._trainer.over_devices(self._forward_pass.sums)  # waits for the device
                if (due := speedometer.tick(epoch, index)) is not None:
                    self._say_speed(epoch, due, self._metrics.means(now - shown))
                    shown = now
            if self._progress is not None:
                self._progress.step(epoch, self._options.num_epochs, index + 1, per_epoch)
            if self._after_step(epoch, index + 1):
                return
        self._end_epoch(epoch, began)

    def _steps(self, loader: Batches, first: int) -> Iterator[int]:
        """Make the steps of the rest of an epoch, and give the number of each."""
        done = self._steps_since_beginning(loader.state.epoch, 0)
        with self._stopping.instead_of_errors():
            for index, batch in enumerate(self._step.batches(loader), first):
                self._one_step(done + index + 1, batch)
                yield index

    def _one_step(self, update: int, batch: tuple[torch.Tensor, torch.Tensor] | None) -> None:
        schedule = self._schedule
        rate = schedule.rate(update)
        if rate != self._rate:
            set_learning_rate(self._trainer.optimizer, rate)
            self._rate = rate
        if (line := schedule.changes(update)) is not None:
            self._say(line)
        if self._monitor is not None:
            self._monitor.begin()
            self._step.step(batch)
            self._trainer.sync()
            for line in self._monitor.end():
                self._say(line)
        elif self._trainer.clock == 0 and self._choice.compiled:
            log.info("what is compiled is kept in %s", use_compile_cache())
            with log_duration("compiling the step"), self._stopping.at_once():
                self._step.step(batch)
                if self._precision.device.type == "cuda":
                    torch.cuda.synchronize()
        else:
            self._step.step(batch)
        if self._average is not None:
            self._average.num_steps += 1

    _rate: float | None = None

    def _after_step(self, epoch: int, done: int) -> bool:
        """Evaluate and save where that is due; whether training ends here."""
        options = self._options
        if self._stopping.asked is not None and not self._kvstore.halted:
            self._kvstore.halt(self._stopping.asked)
        if done == self._per_epoch:
            return False  # the end of an epoch evaluates and saves by itself
        due = options.eval_every and self._steps_since_beginning(epoch, done) % options.eval_every == 0
        if self._leader and due and not self._stopping.asked:
            self._evaluate(epoch, done)
        if self._kvstore.halted or (options.save_batches and done % options.save_batches == 0):
            self._saver.save(self._point(epoch, done), self._measured)
        return bool(self._kvstore.halted)

    def _steps_since_beginning(self, epoch: int, done: int) -> int:
        """Those before a resumption, too; the trainer's clock counts this process's."""
        return epoch * self._per_epoch + done

    def _point(self, epoch: int, done: int) -> Point:
        return Point(epoch, done, done * self._sampling.batch_size * self._place.size)

    def _end_epoch(self, epoch: int, began: float) -> None:
        sums = self._trainer.over_devices(self._forward_pass.sums)  # waits for the device: the whole epoch is timed
        means = self._metrics.means(sums)
        seconds = time.perf_counter() - began
        for name, value in means.items():
            self._say(log_lines.train_line(epoch, name, value))
            self._board.scalar(f"train/{name}", value, epoch + 1)
        self._say(log_lines.time_line(epoch, seconds))
        last = epoch + 1 == self._options.num_epochs or self._kvstore.halted
        saves = last or (epoch + 1) % self._options.save_period == 0
        if saves:
            self._saver.save(Point(epoch + 1), means)
        if self._kvstore.halted not in STOPS:
            self._evaluate(epoch, self._per_epoch)
        if self._kvstore.halted and not saves:
            self._saver.save(Point(epoch + 1), means)

    def _evaluate(self, epoch: int, done: int) -> None:
        """After `done` batches of an epoch; not once the target is reached, which ends the run."""
        self._trainer.sync()
        if self._validation is None or self._reached:
            return
        measured = self._validate(self._validation)
        self._measured = measured
        seconds = round(time.monotonic() - self._began, 6)
        loss = measured["cross-entropy"]
        epochs, accuracy = round(epoch + done / self._per_epoch, 3), measured["accuracy"]
        self._events.write("validation", epoch=epochs, accuracy=accuracy, loss=loss, seconds=seconds)
        ended = done == self._per_epoch
        for name in self._metrics.names:
            self._say(log_lines.validation_line(epoch, name, measured[name], None if ended else done))
            if ended:
                self._board.scalar(f"validation/{name}", measured[name], epoch + 1)
        target = self._options.target_accuracy
        if target is not None and accuracy >= target and not self._kvstore.halted:
            self._reached = True
            steps = self._steps_since_beginning(epoch, done)
            self._kvstore.halt(f"target accuracy {target:g} reached: {accuracy:.4f} after {steps} steps")

    def _validate(self, validation: Validation) -> dict[str, float]:
        with self._average.applied() if self._average is not None else nullcontext():
            return validation.measure(self._trainer.model, self._evaluation_metrics, self._precision)

    # --- the end

    def _leave(self, why: str) -> int:
        """Go without a word to the others: they have the signal, too, or see this process gone."""
        self._say(f"training stopped: {why}, in a step that was not finished and is not saved")
        self._board.close()
        return STOPS[why]

    def _finish(self) -> None:
        self._trainer.sync()
        if self._kvstore.halted:
            self._say(f"training stopped: {self._kvstore.halted}")
        self._trainer.average_buffers()
        self._kvstore.retire()
        seconds = time.monotonic() - self._began
        self._events.write("done", seconds=round(seconds, 6), **self._trainer.facts())
        self._kvstore.barrier()
        if self._kvstore.halted not in STOPS:
            self._trainer.refresh()  # everybody's pushes are in
            if self._leader:
                self._conclude()
        self._board.close()
        self._step.close()
        self._trainer.close()

    def _conclude(self) -> None:
        """Look at the final weights."""
        facts = {"network": self._options.network, "clock": self._trainer.clock}
        if self._validation is not None and self._run_dir is not None:
            measured = self._validate(self._validation)
            self._events.write("final", accuracy=measured["accuracy"], loss=measured["cross-entropy"])
            facts |= {"accuracy": measured["accuracy"]}
        if self._run_dir is not None:
            path = checkpoint.save(Path(self._run_dir), self._trainer.model, self._kvstore, facts)
            self._events.write("checkpoint", file=path.name)

    # --- words

    def _tell(self) -> None:
        if self._fixed and self._place.size > 1:
            self._say(log_lines.resize_line(self._per_epoch))
        if (line := self._schedule.adjustment()) is not None:
            self._say(line)
        self._say(str(self._choice))
        self._say(f"precision {self._precision.name}: {self._precision.reason}")

    def _say(self, line: str) -> None:
        if self._speaks:
            log.info(line)

    def _say_speed(self, epoch: int, due: tuple[int, int, float], values: dict[str, float]) -> None:
        self._say(log_lines.speed_line(epoch, *due, values))
        self._board.scalar("samples/s", due[2], self._steps_since_beginning(epoch, due[1] + 1))
