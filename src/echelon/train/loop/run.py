"""The training loop of one process: epochs, steps, evaluations, checkpoints, and the end of the run.

`step` runs a training step and `trainer` synchronizes with the other workers; this module decides what happens between
steps. `reporting` writes the log lines and curves.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import asdict

import torch

from echelon.data.loading.loader import Batches
from echelon.data.loading.order import State
from echelon.data.sets.datasets import Dataset
from echelon.environment import use_compile_cache
from echelon.schemes.stores import store_kind
from echelon.train import log_lines
from echelon.train.checkpoint.saver import RunPosition, Saver
from echelon.train.loop.batch_times import BatchTimes
from echelon.train.loop.compile_beside import CompileBeside, request_for
from echelon.train.loop.evaluate import Validation
from echelon.train.loop.inputs import train_loader
from echelon.train.loop.learning import LearningCheck
from echelon.train.loop.measurements import Measurements
from echelon.train.loop.monitor import Monitor
from echelon.train.loop.reporting import Reporter, TrainingProgress
from echelon.train.loop.stopping import EXIT_STATUS, Interrupted, StopSignals
from echelon.train.recipe.options import TrainOptions
from echelon.train.recipe.plan import ProcessRank, epoch_size, resume_line, sampling_for, schedule_for, state_at
from echelon.train.step.average import MovingAverage
from echelon.train.step.captured import set_learning_rate
from echelon.train.step.choose import choose_engine, log_duration, make_step, prepare_optimizer
from echelon.train.step.eager import EagerStep, ForwardPass
from echelon.train.step.metrics import Metrics
from echelon.train.step.precision import LossScaler, choose_precision
from echelon.train.trainer.base import Trainer
from echelon.train.trainer.step_times import Phase

log = logging.getLogger(__name__)


class Run:
    """The training of one process."""

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
        self._run_dir = run_dir
        self._place = ProcessRank(kvstore.workers.index(kvstore.rank), len(kvstore.workers), len(options.devices))
        self._is_rank_0 = self._place.rank == 0
        self._is_device_0 = device_index == 0
        self._metrics = Metrics(options.top_k, options.loss, options.metrics)
        self._logged = self._metrics.names
        if kvstore.job_has_events:  # the devices of a worker sum the metrics, so all of them measure the same
            self._metrics = self._metrics.with_cross_entropy()  # for the display and the curves, not for the log
        self._measurements = Measurements(kvstore.events, kvstore.worker_rank, self._metrics)
        self._precision = choose_precision(options.dtype, device)
        self._scaler = LossScaler(device) if self._precision.half is torch.float16 else None
        num_samples = len(dataset.train)
        examples = min(options.num_examples or num_samples, num_samples)
        num_steps = options.num_epochs * epoch_size(examples, self._place.num_workers, options.batch_size)
        self._choice = choose_engine(options, trainer, self._precision, self._place, num_steps)
        self._sampling = sampling_for(options, num_samples, self._place, fixed=self._has_fixed_steps)
        self._per_epoch = self._sampling.batches_per_epoch
        self._forward_pass = ForwardPass(
            trainer.model, self._precision, self._metrics, self._sampling.batch_size, options.label_smoothing
        )
        horizon = options.ema_epochs * self._per_epoch
        self._average = MovingAverage(trainer.model, horizon) if horizon and self._is_rank_0 else None
        self._saver = Saver(options, self._place, trainer, dataset, self._scaler, self._average)
        self._validation = self._make_validation()
        checked = self._is_rank_0 and self._is_device_0 and not options.benchmark  # random labels cannot be learned
        self._learning = LearningCheck(options, dataset.num_classes) if checked else None
        self._monitor = Monitor(trainer.model, options.monitor) if options.monitor else None
        self._report = Reporter(options, progress, logs=self._is_device_0, is_rank_0=self._is_rank_0)
        self._batch_times = BatchTimes.from_environment(device, device_index)
        self._stop = StopSignals()
        self._beside: CompileBeside | None = None
        self._position = RunPosition()
        self._start_s = 0.0
        self._lr: float | None = None
        self._measured: dict[str, float] = {}  # by the last evaluation
        self._reached_target = False
        self._reported_stop = False

    @property
    def _has_fixed_steps(self) -> bool:
        """Whether all steps have the full batch size and all processes run the same number of steps."""
        in_lock_step = self._place.size > 1 and store_kind(self._kvstore.type).lock_step
        return self._choice.captured or self._choice.compiled or in_lock_step

    def _make_validation(self) -> Validation | None:
        """Only rank 0 evaluates."""
        source = self._dataset.validation
        if source is None or not self._is_rank_0:
            return None
        metrics = self._metrics.with_cross_entropy()
        return Validation(source, self._dataset.augment, self._options, metrics, self._precision, self._average)

    # --- training

    def run(self) -> int:
        """Train to the end, or until the run is stopped; returns the exit status of the process."""
        prepare_optimizer(self._choice, self._trainer, self._precision, self._scaler)
        self._position = self._saver.load()
        state = state_at(self._sampling, self._position.epoch, self._position.samples_done, self._place.size)
        self._schedule = schedule_for(self._options, self._place, self._per_epoch, self._position.epoch)
        num_steps = self._num_steps(state.epoch, state.position // self._sampling.batch_size)
        self._step = make_step(
            self._choice, self._options, self._forward_pass, self._trainer, self._scaler, self._average, num_steps
        )
        loader = train_loader(self._options, self._dataset, self._sampling, self._precision.device, state)
        with closing(loader), self._compile_beside() as self._beside, self._stop.recorded():
            self._log_settings(loader.state)
            self._kvstore.barrier()
            self._start_s = time.monotonic()
            self._batch_times.start()
            if self._is_rank_0:
                self._kvstore.events.write("settings", **asdict(self._options))
            self._kvstore.events.write(
                "begin",
                rank=self._kvstore.worker_rank,
                device=_device_name(self._precision.device),
                num_devices=self._place.num_devices,
                batches_per_epoch=self._per_epoch,
                num_epochs=self._options.num_epochs,
                first_step=num_steps,
            )
            try:
                while loader.state.epoch < self._options.num_epochs and not self._kvstore.halted:
                    self._train_epoch(loader)
            except Interrupted as signal:
                # The other processes receive the signal too, or notice that this one has disconnected.
                self._report.info(f"training stopped: {signal}, in a step that was not finished and is not saved")
                self._report.close()
                return EXIT_STATUS[str(signal)]
            self._finish()
        reason = self._kvstore.halted if self._was_interrupted else self._stop.requested  # a signal after training
        return EXIT_STATUS.get(reason or "", 0)

    def _compile_beside(self) -> AbstractContextManager[CompileBeside | None]:
        step, dataset = self._step, self._dataset
        if not self._choice.compiles_beside or isinstance(step, EagerStep):
            return nullcontext()
        return CompileBeside(
            step,
            lambda: request_for(step.forward, self._options, self._place, dataset.num_classes, dataset.image_shape),
            self._say_of_engine,
            self._options.batch_size,
        )

    def _say_of_engine(self, line: str) -> None:
        self._report.info(line)
        self._kvstore.events.write("engine", rank=self._kvstore.worker_rank, line=line)

    def _log_settings(self, start: State) -> None:
        first_epoch, saved = start.epoch, self._position
        if (line := resume_line(saved.epoch, saved.samples_done, start, self._place.size)) is not None:
            self._report.info(line)
        if self._has_fixed_steps and self._place.size > 1:
            self._report.info(log_lines.resize_line(self._per_epoch))
        if (line := self._schedule.adjustment()) is not None:
            self._report.info(line)
        self._report.info(str(self._choice))
        self._report.info(f"precision {self._precision.name}: {self._precision.reason}")
        if first_epoch >= self._options.num_epochs:
            self._report.info(
                f"nothing is left to train: {first_epoch} of --num-epochs {self._options.num_epochs} epochs are done"
            )

    def _train_epoch(self, loader: Batches) -> None:
        epoch = loader.state.epoch
        first = loader.state.position // self._sampling.batch_size
        speedometer = log_lines.Speedometer(self._options.batch_size, self._options.disp_batches)
        self._forward_pass.sums.zero_()
        reported = torch.zeros(len(self._forward_pass.sums), dtype=torch.float64)
        start_s = time.perf_counter()
        self._trainer.model.train()
        for index in self._run_steps(loader, first):
            if index % self._options.disp_batches == 0 or index == first:
                sums = self._trainer.sum_over_devices(self._forward_pass.sums)  # waits for the device
                if (due := speedometer.tick(epoch, index)) is not None:
                    self._report.speed(
                        epoch, due, self._logged_means(sums - reported), self._num_steps(epoch, due[1] + 1)
                    )
                    reported = sums
            self._report.step(epoch, index + 1, self._per_epoch)
            self._measurements.step(epoch + (index + 1) / self._per_epoch, self._forward_pass.sums)
            if self._stops_after(epoch, index + 1):
                return
        self._end_epoch(epoch, start_s)

    def _logged_means(self, sums: torch.Tensor) -> dict[str, float]:
        means = self._metrics.values(sums)
        return {name: means[name] for name in self._logged}

    def _run_steps(self, loader: Batches, first: int) -> Iterator[int]:
        """Run the remaining steps of an epoch; yields the index of each after it has run."""
        before = self._num_steps(loader.state.epoch, 0)
        with self._stop.instead_of_errors():
            for index, batch in enumerate(self._step.batches(loader), first):
                self._run_step(before + index + 1, batch)
                self._batch_times.end_step()
                yield index

    def _run_step(self, update: int, batch: tuple[torch.Tensor, torch.Tensor] | None) -> None:
        lr = self._schedule.rate(update)
        if lr != self._lr:
            set_learning_rate(self._trainer.optimizer, lr)
            self._lr = lr
        if (line := self._schedule.changes(update)) is not None:
            self._report.info(line)
        if self._monitor is not None:
            self._monitor.begin()
            self._step.step(batch)
            self._trainer.sync()
            for line in self._monitor.end():
                self._report.info(line)
        elif self._trainer.clock == 0 and (self._choice.compiled or self._precision.device.type == "cuda"):
            self._run_first_step(batch)
        else:
            self._step.step(batch)
        if self._average is not None:
            self._average.num_steps += 1
        if self._beside is not None:
            self._beside.after_step(update, self._options.num_epochs * self._per_epoch - update)

    def _run_first_step(self, batch: tuple[torch.Tensor, torch.Tensor] | None) -> None:
        """Run a step that compiles, or tunes the convolutions of a GPU; both can take minutes."""
        if self._choice.compiled:
            log.info("compiled kernels are cached in %s", use_compile_cache())
        with log_duration("compiling the step" if self._choice.compiled else "tuning the step"), self._stop.at_once():
            self._step.step(batch)
            if self._precision.device.type == "cuda":
                torch.cuda.synchronize()

    def _num_steps(self, epoch: int, done: int) -> int:
        """Return the steps since the beginning of the run, including those before it was resumed."""
        return epoch * self._per_epoch + done

    # --- between steps

    def _stops_after(self, epoch: int, done: int) -> bool:
        """Evaluate and save if due after `done` steps of an epoch; returns whether training stops here."""
        options = self._options
        self._request_halt()
        if done == self._per_epoch:
            return False  # `_end_epoch` evaluates and saves
        due = options.eval_every and self._num_steps(epoch, done) % options.eval_every == 0
        if self._is_rank_0 and due and not self._stop.requested:
            self._evaluate(epoch, done)
        self._position = RunPosition(epoch, done, done * self._sampling.batch_size * self._place.size)
        if self._kvstore.halted or (options.save_batches and done % options.save_batches == 0):
            self._pause_measuring()
            self._save(self._measured, is_last=bool(self._kvstore.halted))
        return bool(self._kvstore.halted)

    def _save(self, measured: dict[str, float], *, is_last: bool) -> None:
        with self._trainer.times.during(Phase.OTHER):
            self._saver.save(self._position, measured, is_last=is_last)

    def _pause_measuring(self) -> None:
        if self._beside is not None:
            self._beside.pause()

    def _end_epoch(self, epoch: int, start_s: float) -> None:
        self._pause_measuring()
        sums = self._trainer.sum_over_devices(self._forward_pass.sums)  # waits for the device: the whole epoch is timed
        means = self._logged_means(sums)
        self._measurements.end_epoch(epoch + 1, self._forward_pass.sums)
        seconds = time.perf_counter() - start_s
        self._report.epoch_end(epoch, means, seconds)
        if self._is_device_0:
            self._kvstore.events.write(
                "epoch",
                rank=self._kvstore.worker_rank,
                epoch=epoch + 1,
                samples=int(sums[-1]),
                seconds=round(seconds, 6),
                metrics=means,
            )
        self._position = RunPosition(epoch + 1)
        is_last = epoch + 1 == self._options.num_epochs or bool(self._kvstore.halted)
        saves = is_last or (epoch + 1) % self._options.save_period == 0
        if saves:
            self._save(means, is_last=is_last)
        if not self._was_interrupted:
            self._evaluate(epoch, self._per_epoch)
        if self._kvstore.halted and not is_last:
            self._save(means, is_last=True)
        self._warn_if_not_learning(epoch, sums)

    def _warn_if_not_learning(self, epoch: int, sums: torch.Tensor) -> None:
        """Judge the epoch by its training metrics; by the validation loss if the training loss is not measured."""
        if self._learning is None:
            return
        means = self._metrics.values(sums)
        loss = means.get("cross-entropy", self._measured.get("cross-entropy"))
        for text in self._learning.after_epoch(epoch + 1, self._per_epoch, int(sums[-1]), means["accuracy"], loss):
            log.warning(text)
            self._kvstore.events.write("warning", text=text)

    def _evaluate(self, epoch: int, done: int) -> None:
        """Evaluate after `done` batches of an epoch, and stop the run if the target accuracy is reached."""
        self._trainer.sync()
        if self._validation is None or self._reached_target:
            return
        self._pause_measuring()
        epochs = round(epoch + done / self._per_epoch, 3)
        measured = self._measure(self._validation, epochs)
        if measured is None:
            self._request_halt()
            return
        self._measured = measured
        seconds = round(time.monotonic() - self._start_s, 6)
        accuracy = measured["accuracy"]
        self._kvstore.events.write(
            "validation",
            epoch=epochs,
            accuracy=accuracy,
            loss=measured["cross-entropy"],
            metrics=self._added_metrics(measured),
            seconds=seconds,
        )
        batch = None if done == self._per_epoch else done
        self._report.validation(epoch, batch, {name: measured[name] for name in self._logged})
        target = self._options.target_accuracy
        if target is not None and accuracy >= target and not self._kvstore.halted:
            self._reached_target = True
            steps = self._num_steps(epoch, done)
            self._kvstore.halt(f"target accuracy {target:g} reached: {accuracy:.4f} after {steps} steps")

    def _measure(self, validation: Validation, epochs: float) -> dict[str, float] | None:
        """Measure the validation data after some epochs. A signal ends it at once; then the result is None."""

        def report(done: int, total: int) -> None:
            self._kvstore.events.write("validation", epoch=epochs, done=done, total=total)
            self._report.validating(done, total)

        try:
            with self._trainer.times.during(Phase.OTHER):
                return validation.measure(self._trainer.model, self._stop, report)
        except Interrupted as signal:
            self._report.info(f"validation stopped: {signal}")
            return None

    def _request_halt(self) -> None:
        """Ask all workers to stop if a signal asked this one."""
        if self._stop.requested is not None and not self._kvstore.halted:
            self._kvstore.halt(self._stop.requested)

    def _added_metrics(self, measured: dict[str, float]) -> dict[str, float]:
        """Return what --top-k, --loss and --metrics added to the accuracy."""
        return {name: measured[name] for name in self._logged if name != "accuracy"}

    # --- the end

    def _finish(self) -> None:
        """Wait for the other workers, then evaluate and save the final weights."""
        self._trainer.sync()
        self._report_stop()
        self._trainer.average_buffers()
        self._batch_times.write(self._kvstore, self._sampling.batch_size)
        self._kvstore.retire()
        seconds = time.monotonic() - self._start_s
        self._kvstore.events.write("done", seconds=round(seconds, 6), **self._trainer.progress())
        self._kvstore.barrier()
        self._report_stop()  # the request of another worker may have arrived with the barrier
        self._trainer.refresh()  # the weights now include the pushes of all workers
        if self._run_dir is not None:
            self._save_result(self._run_dir)
        self._report.close()
        self._step.close()
        self._trainer.close()

    @property
    def _was_interrupted(self) -> bool:
        """Whether a signal to any worker stopped the training."""
        return self._kvstore.halted in EXIT_STATUS

    def _report_stop(self) -> None:
        """Log once why training stopped before its last epoch was complete."""
        if self._kvstore.halted and not self._reported_stop:
            self._reported_stop = True
            self._report.info(f"training stopped: {self._kvstore.halted}")

    def _save_result(self, run_dir: str) -> None:
        """Save the final weights in the run directory, and evaluate them. All processes call it; rank 0 writes.

        They are saved before the validation, which may take minutes, and again with its result.
        """
        optimizer = self._saver.optimizer_state()
        if not self._is_rank_0:
            return
        path = self._saver.save_result(run_dir, self._position, self._measured, optimizer)
        if self._validation is not None and not self._was_interrupted:
            epochs = round(self._position.epoch + self._position.batch / self._per_epoch, 3)
            measured = self._measure(self._validation, epochs)
            if measured is not None:
                self._saver.save_result(run_dir, self._position, measured, optimizer)
                self._kvstore.events.write(
                    "final",
                    epoch=epochs,
                    accuracy=measured["accuracy"],
                    loss=measured["cross-entropy"],
                    metrics=self._added_metrics(measured),
                )
        self._kvstore.events.write("checkpoint", file=path.name)


def _device_name(device: torch.device) -> str:
    """Return the model of a GPU, or "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
