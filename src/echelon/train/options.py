"""What a training run is told, in one frozen value that every process of the run gets whole."""

from __future__ import annotations

from dataclasses import dataclass, field

from echelon.train.pace import Pace

OPTIMIZERS = ("sgd", "adam", "adamw", "rmsprop", "adagrad")


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """Defaults are those of the digits demo; `--help` of `echelon train` says what each is."""

    data: str = "digits"
    data_dir: str = "data"
    network: str = "digits-cnn"
    num_layers: int | None = None
    kv_store: str = "local"
    staleness: int | None = None
    groups: str | None = None
    data_allocator: bool = False
    data_sharding: str = "data_sharding"
    batch_size: int = 32
    num_epochs: int = 10
    optimizer: str = "sgd"
    lr: float = 0.05
    lr_factor: float = 0.1
    lr_step_epochs: tuple[float, ...] = ()
    momentum: float = 0.9
    weight_decay: float = 1e-4
    seed: int = 0
    eval_every: int = 0  # steps of rank 0; 0: at the end of its epochs
    target_accuracy: float | None = None
    average_buffers: bool = False
    check_finite: bool = False
    pace: Pace = field(default_factory=Pace)
