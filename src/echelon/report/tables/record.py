"""One run, as the tables see it, wherever it was recorded."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from echelon.report.state.epochs import EpochRow

LAYERED = ("resnet", "resnet-v1", "resnetv1", "resnext", "vgg")  # the networks that have --num-layers


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A run. None means not recorded. `status` is empty if the run ended as planned."""

    name: str
    infrastructure: str = ""  # the model of the GPU or CPU, or a name that the user gives
    num_machines: int = 1
    num_workers: int = 1
    num_devices: int = 1  # processes that compute, over all workers
    num_gpus: int = 0  # GPUs that they use; fewer than devices if some share one
    model: str = ""
    data: str = ""
    batch_size: int = 0  # of one worker, over all its devices
    lr: float | None = None
    store: str = "local"
    scheme: str = ""  # BSP, ASP, SSP or GSP
    variant: str = ""  # what else distinguishes the run: a staleness bound, groups, slow workers
    seed: int | None = None
    num_epochs: int = 0  # planned
    epochs: tuple[EpochRow, ...] = ()
    curve: tuple[tuple[float, float], ...] = ()  # seconds and accuracy of the validations
    accuracy: float | None = None  # of the final weights, on the validation data
    samples_per_s: float | None = None
    utilisation: float | None = None  # of its devices, from 0 to 1
    target_accuracy: float | None = None
    status: str = ""

    @property
    def batch_per_device(self) -> int:
        """The samples of one device in one step."""
        return self.batch_size * self.num_workers // max(1, self.num_devices)

    @property
    def total_batch(self) -> int:
        """The samples of one step of all workers."""
        return self.batch_size * self.num_workers

    @property
    def epoch_s(self) -> float | None:
        """The median time of an epoch; the first one often includes tuning and compiling."""
        seconds = [row.seconds for row in self.epochs if row.seconds is not None]
        return statistics.median(seconds) if seconds else None

    @property
    def throughput(self) -> float | None:
        """The samples per second of all workers: the median over the epochs, or the one that was recorded."""
        speeds = [row.samples_per_s for row in self.epochs if row.samples_per_s is not None]
        return statistics.median(speeds) if speeds else self.samples_per_s

    @property
    def kvstore(self) -> str:
        """The store with what distinguishes it."""
        return f"{self.store} {self.variant}".rstrip()

    def seconds_to(self, accuracy: float) -> float | None:
        """Return the seconds until a validation had this accuracy; None if none had."""
        return next((seconds for seconds, reached in self.curve if reached >= accuracy), None)


def model_name(network: str, num_layers: int | None = None, dtype: str | None = None) -> str:
    """Return the name as published tables write it: resnet with 50 layers is resnet50. A chosen precision follows."""
    layers = num_layers if network in LAYERED else None  # scripts have a default for all networks
    name = network + ("" if layers is None else f"-{layers}" if network[-1:].isdigit() else str(layers))
    return name if dtype in (None, "auto") else f"{name} {dtype}"
