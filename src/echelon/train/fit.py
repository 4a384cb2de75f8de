"""The built-in training loop, as one process of a run goes through it.

`fit` puts a run together from its options and trains; the words it logs are MXNet's, the events it writes are what
`echelon train` shows. How a step runs is the engine's matter, who waits for whom the trainer's.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from echelon import models
from echelon.data.datasets import DataOptions, Dataset, make_loader, open_dataset
from echelon.data.device_augment import DeviceLoader, DeviceMemoryLoader
from echelon.data.memory import MemorySource, is_plain
from echelon.data.order import Sampling
from echelon.data.pipeline import Batches, measure_io
from echelon.data.synthetic import SyntheticSource
from echelon.environment import Job
from echelon.errors import UsageError
from echelon.kvstore import create
from echelon.train import checkpoint, log_lines
from echelon.train.average import MovingAverage
from echelon.train.board import Board
from echelon.train.captured import CapturedStep, why_not_captured
from echelon.train.engine import Choice, choose_engine, patience
from echelon.train.evaluate import Validation
from echelon.train.metrics import Metrics
from echelon.train.monitor import Monitor
from echelon.train.optimizers import make_optimizer
from echelon.train.options import TrainOptions
from echelon.train.pace import Pacer
from echelon.train.plan import Place, epoch_size, sampling_for, state_at, worker_batch
from echelon.train.precision import LossScaler, choose_precision
from echelon.train.saving import Point, Saver
from echelon.train.schedules import Schedule, make_schedule
from echelon.train.served import ServedStep
from echelon.train.server_trainer import ServerTrainer
from echelon.train.steps import EagerStep, Mixup, Work, set_rate
from echelon.train.trainer import Trainer

log = logging.getLogger(__name__)

TERMINATED = 128 + signal.SIGTERM


def fit(options: TrainOptions, run_dir: str | None = None) -> int:
    """Train as one process of the job that the environment describes; returns the exit status."""
    job = Job.from_environment()
    device = torch.device(options.devices[job.device_index])
    dataset = open_data(options)
    log.info(log_lines.start_line(asdict(options)))
    batch = worker_batch(options, len(dataset.train), job.num_workers)
    if batch != options.batch_size:
        log.info("--batch-size %d is more than an epoch has for a worker: it is %d", options.batch_size, batch)
        options = replace(options, batch_size=batch)
    if options.test_io:
        return test_io(options, dataset)
    _prepare(device)
    torch.manual_seed(options.seed)
    model = models.build(
        options.network,
        num_classes=dataset.num_classes,
        image_shape=dataset.image_shape,
        num_layers=options.num_layers,
        initializer=options.initializer,
        **options.network_options,
    ).to(device)
    if device.type == "cuda":
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = make_optimizer(
        options.optimizer, model, lr=options.lr, momentum=options.momentum, weight_decay=options.weight_decay
    )
    kvstore = create(
        options.kv_store,
        staleness=options.staleness,
        groups=options.groups,
        check_finite=options.check_finite,
        device=device,
    )
    trainer = Trainer(
        model,
        optimizer,
        kvstore,
        average_buffers=options.average_buffers,
        check_finite=options.check_finite,
        overlap=options.dtype != "float16",  # its gradients are looked at, and unscaled, before they leave
    )
    return _Run(options, dataset, trainer, device, run_dir, len(options.devices), job.device_index).run()


def open_data(options: TrainOptions) -> Dataset:
    """The dataset that the options name, with the augmentation they ask for."""
    told = DataOptions(
        data_dir=options.data_dir,
        data_train=options.data_train,
        data_train_idx=options.data_train_idx,
        data_val=options.data_val,
        data_val_idx=options.data_val_idx,
        image_shape=options.image_shape,
        num_classes=options.num_classes,
        num_examples=options.num_examples,
        skip_bad_records=options.skip_bad_records,
    )
    dataset = open_dataset("synthetic" if options.benchmark else options.data, told)
    given: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in options.augment.items()}
    return replace(dataset, augment=replace(dataset.augment, **given))


def test_io(options: TrainOptions, dataset: Dataset) -> int:
    """Only read the training data, and say how fast that is."""
    sampling = sampling_for(options, len(dataset.train), Place(0, 1), fixed=False)
    with closing(train_loader(options, dataset, sampling, torch.device("cpu"))) as loader:
        for line in measure_io(loader, options.disp_batches):
            log.info(line)
    return 0


def train_loader(options: TrainOptions, dataset: Dataset, sampling: Sampling, device: torch.device) -> Batches:
    """Batches for a device: on a GPU small sets live there, others cross as bytes and are normalised there."""
    source, augment = dataset.train, dataset.augment
    on_gpu = device.type == "cuda"
    if on_gpu and isinstance(source, MemorySource) and is_plain(augment, *source.images.shape[1:3]):
        return DeviceMemoryLoader(source, augment, sampling, device)
    loader = make_loader(
        source,
        augment,
        sampling,
        threads=options.data_nthreads,
        output="uint8" if on_gpu else "float32",
        skip_bad_records=options.skip_bad_records,
    )
    if on_gpu and not isinstance(source, SyntheticSource):
        return DeviceLoader(loader, augment, device)
    return loader


class _Run:
    """One process's training."""

    def __init__(
        self,
        options: TrainOptions,
        dataset: Dataset,
        trainer: Trainer,
        device: torch.device,
        run_dir: str | None,
        num_devices: int,
        device_index: int,
    ) -> None:
        kvstore = trainer.kvstore
        self._options = options
        self._dataset = dataset
        self._trainer = trainer
        self._kvstore = kvstore
        self._events = kvstore.events
        self._run_dir = run_dir
        workers = kvstore.workers
        self._place = Place(workers.index(kvstore.rank), len(workers), num_devices)
        self._leader = self._place.rank == 0
        self._speaks = device_index == 0
        self._metrics = Metrics(options.top_k, options.loss)
        self._precision = choose_precision(options.dtype, device)
        self._scaler = LossScaler(device) if self._precision.half is torch.float16 else None
        self._choice = self._choose(device)
        self._sampling = sampling_for(options, len(dataset.train), self._place, fixed=self._fixed)
        self._loader = train_loader(options, dataset, self._sampling, device)
        self._work = Work(
            trainer.model, self._precision, self._metrics, self._sampling.batch_size, options.label_smoothing
        )
        horizon = options.ema_epochs * len(self._loader)
        self._average = MovingAverage(trainer.model, horizon) if horizon and self._leader else None
        self._saver = Saver(
            options, self._place, trainer, dataset.augment, dataset.num_classes, self._scaler, self._average
        )
        self._validation = (
            Validation(dataset.validation, dataset.augment, device, options.data_nthreads, options.skip_bad_records)
            if dataset.validation is not None and self._leader
            else None
        )
        self._monitor = Monitor(trainer.model, options.monitor) if options.monitor else None
        self._board = Board.open(options.tensorboard if self._leader else None)
        self._began = 0.0
        self._measured: dict[str, float] = {}
        self._stop: str | None = None

    # --- what is decided before

    @property
    def _fixed(self) -> bool:
        """Whether all steps are of one size, and all processes make as many."""
        return self._choice.captured or self._choice.compiled or (self._place.size > 1 and self._trainer.lock_step)

    def _choose(self, device: torch.device) -> Choice:
        options = self._options
        obstacle: str | None = None
        served = isinstance(self._trainer, ServerTrainer)
        if served and self._precision.half is torch.float16:
            obstacle = "float16's gradients are looked at before they leave for the servers"
        elif not self._trainer.capturable and not served:
            obstacle = f"{self._kvstore.type} with {self._place.size} processes meets others in every step"
        elif options.monitor:
            obstacle = "--monitor looks into steps"
        elif options.mixup:
            obstacle = "--mixup draws on the host"
        elif options.skip_bad_records and not isinstance(self._dataset.train, MemorySource | SyntheticSource):
            obstacle = "--skip-bad-records makes some batches smaller"
        elif options.pace.seconds:
            obstacle = "--pace waits inside the step"
        elif not served:
            obstacle = why_not_captured(self._trainer.optimizer, self._precision.half)
        return choose_engine(options.engine, device.type, obstacle, options.num_epochs * self._num_batches())

    def _num_batches(self) -> int:
        examples = min(self._options.num_examples or len(self._dataset.train), len(self._dataset.train))
        return epoch_size(examples, self._place.num_workers, self._options.batch_size)

    def _schedule(self, point: Point) -> Schedule:
        options = self._options
        large_batch = options.optimizer.lower() == "lbsgd"
        total = options.batch_size * self._place.num_workers
        scale = max(1.0, -(-max(options.macrobatch_size, total) // total)) if large_batch else 1.0
        warmup = options.warmup_epochs if options.warmup_epochs is not None else 5.0 if scale > 1 else 0.0
        return make_schedule(
            lr=options.lr,
            factor=options.lr_factor,
            step_epochs=options.lr_step_epochs,
            kind=options.lr_schedule,
            epoch_size=len(self._loader),
            num_epochs=options.num_epochs,
            begin_epoch=point.epoch,
            warmup_epochs=warmup,
            warmup_strategy=options.warmup_strategy,
            warmup_scale=scale,
        )

    # --- training

    def run(self) -> int:
        """Train, meet the others, and as the leader evaluate and save what came out."""
        with closing(self._loader), self._terminable():
            point = self._saver.load()
            self._loader.state = state_at(self._sampling, point.epoch, point.samples_done, self._place.size)
            self._schedule_of_run = self._schedule(point)
            self._tell(point)
            self._kvstore.barrier()
            self._began = time.monotonic()
            self._events.write("begin", rank=self._kvstore.rank, batches_per_epoch=len(self._loader))
            self._step = self._make_step()
            while self._loader.state.epoch < self._options.num_epochs and not self._kvstore.halted:
                self._train_epoch(self._loader.state.epoch)
            self._finish()
        return TERMINATED if self._stop else 0

    def _make_step(self) -> CapturedStep | ServedStep | EagerStep:
        options, choice = self._options, self._choice
        if choice.captured and isinstance(self._trainer, ServerTrainer):
            return ServedStep(self._work, self._trainer, compiled=choice.compiled, average=self._average)
        if choice.captured:
            return CapturedStep(
                self._work, self._trainer, self._scaler, compiled=choice.compiled, average=self._average
            )
        mixup = Mixup(options.mixup, options.seed, self._place.rank) if options.mixup else None
        pacer = Pacer(options.pace, self._kvstore.rank)
        return EagerStep(
            self._work,
            self._trainer,
            self._scaler,
            pacer,
            compiled=choice.compiled,
            mixup=mixup,
            average=self._average,
        )

    def _train_epoch(self, epoch: int) -> None:
        first = self._loader.state.position // self._sampling.batch_size
        per_epoch = len(self._loader)
        speedometer = log_lines.Speedometer(self._options.batch_size, self._options.disp_batches)
        self._work.sums.zero_()
        shown = torch.zeros(len(self._work.sums), dtype=torch.float64)
        began = time.perf_counter()
        self._trainer.model.train()
        for index, batch in enumerate(self._step.batches(self._loader), first):
            self._one_step(epoch * per_epoch + index + 1, batch)
            if index % self._options.disp_batches == 0 or index == first:
                now = self._work.sums.to("cpu", copy=True)  # waits for the device, which may be many steps behind
                if (due := speedometer.tick(epoch, index)) is not None:
                    self._say_speed(epoch, due, self._metrics.means(now - shown))
                    shown = now
            if self._after_step(epoch, index + 1, per_epoch):
                return
        if self._kvstore.halted:
            return
        self._end_epoch(epoch, began)

    def _one_step(self, update: int, batch: tuple[torch.Tensor, torch.Tensor] | None) -> None:
        schedule = self._schedule_of_run
        rate = schedule.rate(update)
        if rate != self._rate:
            set_rate(self._trainer.optimizer, rate)
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
            with patience("compiling the step"):
                self._step.step(batch)
                if self._precision.device.type == "cuda":
                    torch.cuda.synchronize()
        else:
            self._step.step(batch)
        if self._average is not None:
            self._average.num_steps += 1

    _rate: float | None = None

    def _after_step(self, epoch: int, done: int, per_epoch: int) -> bool:
        """Evaluate and save where that is due; whether training ends here."""
        options, clock = self._options, self._trainer.clock
        if self._leader and options.eval_every and clock % options.eval_every == 0:
            self._evaluate(epoch + done / per_epoch)
        if self._stop is not None and not self._kvstore.halted:
            self._kvstore.halt(self._stop)
        if self._kvstore.halted:
            if self._stop is not None and done < per_epoch:
                self._saver.save(self._point(epoch, done), self._measured)
            return True
        if options.save_batches and done % options.save_batches == 0 and done < per_epoch:
            self._saver.save(self._point(epoch, done), self._measured)
        return False

    def _point(self, epoch: int, done: int) -> Point:
        return Point(epoch, done, done * self._sampling.batch_size * self._place.size)

    def _end_epoch(self, epoch: int, began: float) -> None:
        means = self._metrics.means(self._work.sums)  # waits for the device, so that the time is all of the epoch
        seconds = time.perf_counter() - began
        for name, value in means.items():
            self._say(log_lines.train_line(epoch, name, value))
            self._board.scalar(f"train/{name}", value, epoch + 1)
        self._say(log_lines.time_line(epoch, seconds))
        if (epoch + 1) % self._options.save_period == 0 or epoch + 1 == self._options.num_epochs:
            self._saver.save(Point(epoch + 1), means)
        if not self._options.eval_every:
            self._evaluate(epoch + 1)

    def _evaluate(self, epoch: float) -> None:
        self._trainer.sync()
        if self._validation is None:
            return
        measured = self._validate(self._validation)
        self._measured = measured
        seconds = round(time.monotonic() - self._began, 6)
        loss = measured["cross-entropy"]
        self._events.write(
            "validation", epoch=round(epoch, 3), accuracy=measured["accuracy"], loss=loss, seconds=seconds
        )
        if epoch == int(epoch):
            for name in self._metrics.names:
                self._say(log_lines.validation_line(int(epoch) - 1, name, measured[name]))
                self._board.scalar(f"validation/{name}", measured[name], int(epoch))
        target = self._options.target_accuracy
        if target is not None and measured["accuracy"] >= target and not self._kvstore.halted:
            self._kvstore.halt(f"accuracy {measured['accuracy']:.4f} reached the target {target:g}")

    def _validate(self, validation: Validation) -> dict[str, float]:
        with self._average.applied() if self._average is not None else nullcontext():
            return validation.measure(self._trainer.model, self._evaluation_metrics, self._precision)

    @property
    def _evaluation_metrics(self) -> Metrics:
        """The run's own and the cross-entropy, which curves are drawn of."""
        losses = self._options.loss if "ce" in self._options.loss.split(",") else f"ce,{self._options.loss}"
        return Metrics(self._options.top_k, losses)

    # --- the end

    def _finish(self) -> None:
        self._trainer.sync()
        self._trainer.average_buffers()
        self._kvstore.retire()
        seconds = time.monotonic() - self._began
        self._events.write("done", seconds=round(seconds, 6), **self._trainer.facts())
        self._kvstore.barrier()
        if self._leader and not self._stop:
            self._conclude()
        self._board.close()
        if isinstance(self._step, ServedStep):
            self._step.close()
        self._trainer.close()

    def _conclude(self) -> None:
        """Everybody's pushes are in: look at the final weights."""
        self._trainer.refresh()
        facts = {"network": self._options.network, "clock": self._trainer.clock}
        if self._validation is not None and self._run_dir is not None:
            measured = self._validate(self._validation)
            self._events.write("final", accuracy=measured["accuracy"], loss=measured["cross-entropy"])
            facts |= {"accuracy": measured["accuracy"]}
        if self._run_dir is not None:
            path = checkpoint.save(Path(self._run_dir), self._trainer.model, self._kvstore, facts)
            self._events.write("checkpoint", file=path.name)

    # --- words

    def _tell(self, point: Point) -> None:
        if self._fixed and self._place.size > 1:
            self._say(log_lines.resize_line(len(self._loader)))
        if (line := self._schedule_of_run.adjustment()) is not None:
            self._say(line)
        self._say(str(self._choice))
        self._say(f"precision {self._precision.name}: {self._precision.reason}")

    def _say(self, line: str) -> None:
        if self._speaks:
            log.info(line)

    def _say_speed(self, epoch: int, due: tuple[int, int, float], values: dict[str, float]) -> None:
        self._say(log_lines.speed_line(epoch, *due, values))
        self._board.scalar("samples/s", due[2], self._trainer.clock)

    @contextmanager
    def _terminable(self) -> Iterator[None]:
        """SIGTERM ends training after the step under way, with a checkpoint."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def note(number: int, frame: object) -> None:
            self._stop = "SIGTERM"

        before = signal.signal(signal.SIGTERM, note)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)


def _prepare(device: torch.device) -> None:
    if device.type != "cuda":
        return
    if device.index is not None and device.index >= torch.cuda.device_count():
        raise UsageError(f"there is no GPU {device.index}; this machine has {torch.cuda.device_count()}")
    torch.cuda.set_device(device)
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.benchmark_limit = 0  # try all algorithms, not the first ten
    torch.set_float32_matmul_precision("high")
