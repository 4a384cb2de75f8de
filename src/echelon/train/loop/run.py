"""The training loop of one process: epochs, steps, evaluations, checkpoints, and the end of the run.

`step` runs a training step and `trainer` synchronizes with the other workers; this module decides what happens between
steps. `reporting` writes the log lines and curves.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import asdict

import torch

from echelon.data.sets.datasets import Dataset
from echelon.environment import use_compile_cache
from echelon.errors import NOT_WHOLE
from echelon.train import log_lines
from echelon.train.checkpoint.saver import RunPosition, Saver
from echelon.train.loop.compile_beside import CompileBeside, request_for
from echelon.train.loop.evaluation.evaluator import Evaluator
from echelon.train.loop.feeds.choose import plan_feed
from echelon.train.loop.reports.batch_times import BatchTimes
from echelon.train.loop.reports.measurements import Measurements
from echelon.train.loop.reports.monitor import Monitor
from echelon.train.loop.reports.reporting import Reporter, TrainingProgress
from echelon.train.loop.stopping import EXIT_STATUS, Interrupted, StopSignals
from echelon.train.recipe.options import TrainOptions
from echelon.train.recipe.plan import ProcessRank, epoch_size, schedule_for
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
        num_workers: int,
        progress: TrainingProgress | None,
    ) -> None:
        """`num_workers`: those that the job was started with."""
        kvstore = trainer.kvstore
        self._dataset = dataset
        self._trainer = trainer
        self._kvstore = kvstore
        self._is_late = kvstore.is_late  # the others have weights and a position, whatever the checkpoints say
        self._run_dir = run_dir
        place = ProcessRank(kvstore.workers.index(kvstore.rank), len(kvstore.workers), len(options.devices))
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
        num_steps = options.num_epochs * epoch_size(examples, place.num_workers, options.batch_size)
        self._choice = choose_engine(options, trainer, self._precision, place, num_steps)
        self._plan = plan = plan_feed(options, dataset, trainer, self._choice, place, num_workers)
        self._options, self._place, self._per_epoch = plan.options, plan.place, plan.per_epoch
        self._forward_pass = ForwardPass(
            trainer.model, self._precision, self._metrics, plan.batch_size, options.label_smoothing
        )
        horizon = options.ema_epochs * self._per_epoch
        averages = kvstore.is_first or (kvstore.survives_deaths and self._is_device_0)  # it may become the first one
        self._average = MovingAverage(trainer.model, horizon) if horizon and averages else None
        self._saver = Saver(self._options, self._place, trainer, dataset, self._scaler, self._average)
        self._monitor = Monitor(trainer.model, options.monitor) if options.monitor else None
        self._report = Reporter(options, progress, logs=self._is_device_0, is_first=lambda: kvstore.is_first)
        self._batch_times = BatchTimes.from_environment(device, device_index)
        self._stop = StopSignals()
        self._evaluator = Evaluator(
            options,
            dataset,
            trainer,
            self._metrics,
            self._logged,
            self._precision,
            self._average,
            self._stop,
            self._report,
        )
        self._beside: CompileBeside | None = None
        self._position = RunPosition()
        self._num_steps = 0  # since the beginning of the run, as the schedule counts them
        self._start_s = 0.0
        self._lr: float | None = None
        self._reported_stop = False
        self._not_whole = False  # the result of the run: it could not be saved, or has NaN
        self._announced_leaving = False
        self._has_stopped = False  # where all workers stop

    # --- training

    def run(self) -> int:
        """Train to the end, or until the run is stopped; returns the exit status of the process."""
        prepare_optimizer(self._choice, self._trainer, self._precision, self._scaler)
        self._position = self._saver.follow() if self._is_late else self._saver.load()
        device = self._precision.device
        self._feed = feed = self._plan.open(
            self._dataset,
            self._trainer,
            device,
            self._position,
            self._save_at_cut,
            self._is_stopping,
            is_late=self._is_late,
        )
        self._schedule = schedule_for(self._options, self._place, self._per_epoch, self._position.epoch)
        self._num_steps = num_steps = feed.num_steps(feed.epoch, feed.first)
        self._step = make_step(
            self._choice, self._options, self._forward_pass, self._trainer, self._scaler, self._average, num_steps
        )
        with closing(feed), self._compile_beside() as self._beside, self._stop.recorded(), self._saver.writer:
            self._log_settings()
            if not self._is_late:  # the others make the next barrier at their end, and wait for this one's samples
                self._kvstore.barrier()
            self._start_s = time.monotonic()
            self._batch_times.start()
            if self._kvstore.is_first and not self._is_late:
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
                while feed.epoch < self._options.num_epochs and not self._is_stopping():
                    self._train_epoch()
                self._stop_between_epochs()
            except Interrupted as interrupted:
                # The other processes receive the signal too, or notice that this one has disconnected.
                self._saver.finish()
                self._report.info(f"training stopped: {interrupted}, in a step that was not finished and is not saved")
                self._report.close()
                return EXIT_STATUS[str(interrupted)]
            if self._kvstore.may_leave and not self._kvstore.halted:
                return self._leave()
            self._finish()
        if self._not_whole:
            return NOT_WHOLE
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

    def _log_settings(self) -> None:
        first_epoch = self._feed.epoch
        if (line := self._feed.resume_line(self._position)) is not None:
            self._report.info(line)
        if self._plan.in_lock_step:
            self._report.info(log_lines.resize_line(self._per_epoch))
        if (line := self._schedule.adjustment()) is not None:
            self._report.info(line)
        self._report.info(str(self._choice))
        self._report.info(f"precision {self._precision.name}: {self._precision.reason}")
        if first_epoch >= self._options.num_epochs:
            self._report.info(
                f"nothing is left to train: {first_epoch} of --num-epochs {self._options.num_epochs} epochs are done"
            )

    def _train_epoch(self) -> None:
        epoch, first = self._feed.epoch, self._feed.first
        speedometer = log_lines.Speedometer(self._options.batch_size, self._options.disp_batches)
        self._forward_pass.sums.zero_()
        reported = torch.zeros(len(self._forward_pass.sums), dtype=torch.float64)
        start_s = time.perf_counter()
        self._trainer.model.train()
        for index in self._run_steps(epoch, first):
            if index % self._options.disp_batches == 0 or index == first:
                sums = self._trainer.sum_over_devices(self._forward_pass.sums)  # waits for the device
                if (due := speedometer.tick(epoch, index)) is not None:
                    self._report.speed(
                        epoch, due, self._logged_means(sums - reported), self._feed.num_steps(epoch, due[1] + 1)
                    )
                    reported = sums
            done = self._feed.epochs(epoch, index + 1)
            self._report.step(epoch, round((done - epoch) * self._per_epoch), self._per_epoch)
            self._measurements.step(done, self._forward_pass.sums)
            if self._feed.is_leased:
                self._trainer.epochs = round(done, 4)
            if self._stops_after(epoch, index + 1):
                return
        if self._feed.epoch > epoch:
            self._end_epoch(epoch, start_s)
        else:  # the run was stopped while this worker waited for samples
            self._stop_at(epoch, 0)

    def _logged_means(self, sums: torch.Tensor) -> dict[str, float]:
        means = self._metrics.values(sums)
        return {name: means[name] for name in self._logged}

    def _run_steps(self, epoch: int, first: int) -> Iterator[int]:
        """Run the remaining steps of an epoch; yields the index of each after it has run."""
        with self._stop.instead_of_errors():
            for index, batch in enumerate(self._feed.batches(self._step), first):
                self._run_step(self._feed.num_steps(epoch, index) + 1, batch)
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

    # --- between steps

    def _stops_after(self, epoch: int, done: int) -> bool:
        """Evaluate and save if due after `done` steps of an epoch; returns whether training stops here."""
        options = self._options
        self._num_steps += 1
        self._request_halt()
        if self._feed.ends_epoch(done):
            return False  # `_end_epoch` evaluates and saves
        due = options.eval_every and self._num_steps % options.eval_every == 0
        if due and self._kvstore.is_first and not self._stop.requested:
            self._evaluate(epoch, done)
        if self._is_stopping():
            self._stop_at(epoch, done)
            return True
        if options.save_batches and done % options.save_batches == 0:
            self._save_here(epoch, done)
        if self._kvstore.is_first and options.model_prefix is not None and self._saves_after(epoch):
            self._feed.prepare_save(epoch)
        return False

    def _is_stopping(self) -> bool:
        """Whether training ends here: for all workers, or for this one because it was told to end."""
        self._request_halt()
        return bool(self._kvstore.halted) or self._kvstore.may_leave

    def _saves_after(self, epoch: int) -> bool:
        return epoch + 1 == self._options.num_epochs or (epoch + 1) % self._options.save_period == 0

    def _stop_between_epochs(self) -> None:
        """Stop at a cut, if the run was stopped at the end of this worker's epoch: others may be in the next one.

        They wait until all workers have returned their leases. In lock-step all stop after the same step.
        """
        is_cut = self._feed.is_leased and not self._plan.in_lock_step
        if is_cut and not self._has_stopped and self._feed.epoch < self._options.num_epochs:
            self._stop_at(self._feed.epoch, 0)

    def _stop_at(self, epoch: int, done: int) -> None:
        """Save where all workers stop. A worker that leaves alone saves nothing: the others train on."""
        self._pause_measuring()
        if not self._kvstore.halted:
            return
        self._has_stopped = True
        self._position = self._feed.stop(epoch, done)
        if self._feed.is_leased:
            self._trainer.refresh()
        self._save(self._evaluator.measured, is_last=True)

    def _save_here(self, epoch: int, done: int) -> None:
        """Save in the middle of an epoch, now or at the next cut. Without lock-step only one worker makes a cut."""
        if self._feed.is_leased and not (self._plan.in_lock_step or self._kvstore.is_first):
            return
        if (position := self._feed.save_here(epoch, done)) is not None:
            self._pause_measuring()
            self._position = position
            self._save(self._evaluator.measured, is_last=False)

    def _save_at_cut(self, position: RunPosition) -> None:
        """Save while no worker is in a step. At the end of an epoch, this comes before `_end_epoch`."""
        self._position = position
        self._trainer.refresh()  # with the last steps of all workers
        ends_epoch = position.epoch > self._feed.epoch
        sums = self._forward_pass.sums.cpu()
        self._save(self._logged_means(sums) if ends_epoch else self._evaluator.measured, is_last=False)

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
        if self._feed.is_leased:
            self._trainer.epochs = float(epoch + 1)
            if epoch + 1 == self._options.num_epochs:
                self._trainer.refresh()  # with the last steps of all workers
        saves = is_last or self._saves_after(epoch)
        if saves and (self._feed.saves_end(epoch) or not self._kvstore.is_first):
            self._save(means, is_last=is_last)
        if not self._was_interrupted:
            self._evaluate(epoch, self._per_epoch)
        if self._kvstore.halted and not is_last:
            self._save(means, is_last=True)
        if self._is_device_0:
            self._evaluator.check_learning(epoch, self._per_epoch, sums)

    def _evaluate(self, epoch: int, done: int) -> None:
        """Evaluate after `done` batches of an epoch, in the first living process."""
        self._trainer.sync()
        if not self._kvstore.is_first:
            return
        self._pause_measuring()
        epochs = round(self._feed.epochs(epoch, done), 3)
        batch = None if done == self._per_epoch else done
        seconds = time.monotonic() - self._start_s
        num_steps = self._feed.num_steps(epoch, done)
        wait_for_file = self._saver.writer.wait  # MXNet logs a checkpoint before its validation
        with self._feed.away():
            self._evaluator.evaluate(epoch, epochs, batch, seconds, num_steps, wait_for_file)
        self._request_halt()  # a signal may have ended the validation

    def _request_halt(self) -> None:
        """Ask all workers to stop if a signal asked this one. With leases, SIGTERM may be for this worker alone."""
        reason = self._stop.requested
        if reason is None or self._kvstore.halted:
            return
        if not (self._feed.is_leased and reason == signal.SIGTERM.name):
            self._kvstore.halt(reason)
        elif not self._announced_leaving:
            self._announced_leaving = True
            self._kvstore.announce_leaving(reason)

    # --- the end

    def _leave(self) -> int:
        """Leave the job alone, because a signal asked this worker only. Others train what it has not."""
        self._report.info(f"leaving the job: {self._stop.requested}; the other workers continue")
        self._saver.finish()
        self._feed.close()
        self._kvstore.retire()
        self._report.close()
        self._step.close()
        self._trainer.close()
        return 0

    def _finish(self) -> None:
        """Wait for the other workers, then evaluate and save the final weights."""
        self._trainer.sync()
        self._report_stop()
        self._trainer.average_buffers()
        self._batch_times.write(self._kvstore, self._plan.batch_size)
        self._kvstore.retire()
        seconds = time.monotonic() - self._start_s
        self._kvstore.events.write("done", seconds=round(seconds, 6), **self._trainer.progress())
        self._kvstore.barrier()
        self._report_stop()  # the request of another worker may have arrived with the barrier
        self._trainer.refresh()  # the weights now include the pushes of all workers
        self._hand_in_result()
        if (defect := self._trainer.not_finite()) is not None:
            self._report_defect(defect)
        self._report.close()
        self._step.close()
        self._trainer.close()

    def _hand_in_result(self) -> None:
        """Save and evaluate the final weights in the first living process. If that one dies, the next one does it."""
        while True:
            first = self._kvstore.workers[0]
            self._saver.save_if_missing(self._position, self._evaluator.measured)
            if self._run_dir is not None:
                self._save_result(self._run_dir)
            if (defect := self._saver.finish()) is not None:
                self._report_defect(defect)
            if not self._kvstore.survives_deaths or first in self._kvstore.meet():
                return

    def _report_defect(self, defect: str) -> None:
        self._not_whole = True
        log.error("the result is not whole: %s", defect)
        self._kvstore.report_defect(defect)

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
        """Save the final weights in the run directory, and evaluate them. All processes call it; the first one writes.

        They are saved before the validation, which may take minutes, and again with its result.
        """
        optimizer = self._saver.optimizer_state()
        if not self._kvstore.is_first:
            return
        path = self._saver.save_result(run_dir, self._position, self._evaluator.measured, optimizer)
        if not self._was_interrupted:
            epochs = round(self._feed.epochs_at(self._position), 3)
            measured = self._evaluator.measure_final(epochs)
            if measured is not None:
                self._saver.save_result(run_dir, self._position, measured, optimizer)
        if self._saver.finish() is None:
            self._kvstore.events.write("checkpoint", file=path.name)


def _device_name(device: torch.device) -> str:
    """Return the model of a GPU, or "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
