"""How busy the devices of a run are, from the samples of its launcher."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Resources:
    """Sums over the samples taken while the run trains, and the last sample."""

    num_samples: int = 0
    cpu_percent: float = 0.0  # 100 per busy core
    gpu_percent: list[float] = field(default_factory=list)  # by the number of the GPU
    last: dict[str, Any] | None = None

    def take(self, event: dict[str, Any]) -> None:
        """Add a sample."""
        self.last = event
        self.num_samples += 1
        self.cpu_percent += event["cpu_percent"]
        percents = [gpu["utilisation_percent"] for gpu in event["gpus"]]
        self.gpu_percent += [0.0] * (len(percents) - len(self.gpu_percent))
        for number, percent in enumerate(percents):
            self.gpu_percent[number] += percent

    def utilisation(self, num_gpus: int, num_cores: int) -> float | None:
        """Return the mean utilisation from 0 to 1 of the cores or, for a run on GPUs, of its GPUs: the busiest ones."""
        if not self.num_samples:
            return None
        if not num_gpus:
            return round(min(1.0, self.cpu_percent / self.num_samples / (100 * num_cores)), 4)
        busiest = sorted(self.gpu_percent, reverse=True)[:num_gpus]
        return round(sum(busiest) / len(busiest) / self.num_samples / 100, 4) if busiest else None
