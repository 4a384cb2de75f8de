"""The settings of a training run, in one frozen value that every process of the run receives."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from echelon.train.recipe.pace import Pace

ENGINES = ("auto", "eager", "compile", "graph")
OPTIMIZERS = (  # the names of `recipe.optimizers.NAMES`, which cannot be imported without torch
    *("sgd", "ccsgd", "nag", "adam", "adamw", "rmsprop", "adagrad", "adadelta", "adamax", "nadam", "lbsgd"),
    *("groupadagrad", "signum", "ftml", "ftrl", "dcasgd", "lars", "lamb", "sgld", "test"),
)
OPTIMIZER_STYLES = ("torch", "mxnet")
METRICS = ("acc", "ce", "nll_loss", "loss", "perplexity", "f1", "mcc", "pearsonr", "mae", "mse", "rmse")
EQUAL_SHARES, SHARES_FROM_FILE, LEASES = ALLOCATORS = (0, 1, 2)  # the values of --data-allocator
DTYPES = ("auto", "float32", "float16", "bfloat16")


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """Settings with the defaults of the digits demo; `echelon train --help` describes each."""

    # data
    data: str = "digits"
    data_dir: str = "data"
    data_train: str | None = None
    data_train_idx: str | None = None
    data_val: str | None = None
    data_val_idx: str | None = None
    image_shape: tuple[int, int, int] | None = None
    num_classes: int | None = None
    num_examples: int | None = None  # per epoch, over all workers; None: all samples of the data
    num_val_examples: int | None = None  # None: all samples of the validation data
    data_nthreads: int = 4
    skip_bad_records: bool = False
    benchmark: bool = False
    test_io: bool = False
    augment: dict[str, Any] = field(default_factory=dict)  # the fields of AugmentConfig that were given
    # network
    network: str = "digits-cnn"
    num_layers: int | None = None
    initializer: str = "default"
    network_options: dict[str, Any] = field(default_factory=dict)
    # synchronization
    kv_store: str = "local"
    staleness: int | None = None
    groups: str | None = None
    lr_scale: str = "share"
    data_allocator: int | None = None  # see ALLOCATORS; None: leases where they are possible
    data_sharding: str = "data_sharding"
    batch_by_speed: bool = False
    devices: tuple[str, ...] = ("cpu",)
    # steps
    batch_size: int = 32  # per worker, over all its devices
    num_epochs: int = 10
    optimizer: str = "sgd"
    optimizer_style: str = "torch"
    lr: float = 0.05
    lr_factor: float = 0.1
    lr_step_epochs: str = ""
    lr_schedule: str = "step"
    momentum: float = 0.9
    weight_decay: float = 1e-4
    clip_gradient: float | None = None
    max_grad_norm: float | None = None
    macrobatch_size: int = 0
    warmup_epochs: float | None = None
    warmup_strategy: str = "linear"
    label_smoothing: float = 0.0
    mixup: float = 0.0
    ema_epochs: float = 0.0
    dtype: str = "auto"
    engine: str = "auto"
    seed: int = 0
    # reports and checkpoints
    disp_batches: int = 20
    top_k: int = 0
    loss: str = ""
    metrics: str = ""
    monitor: int = 0
    tensorboard: str | None = None
    wandb: str | None = None
    model_prefix: str | None = None
    save_period: int = 1
    save_batches: int = 0
    load_epoch: int | None = None
    pretrained_model: str | None = None  # the run starts from its weights, except for those of the last layer
    pretrained_epoch: int | None = None
    resume: bool = False
    eval_every: int = 0  # in steps of rank 0; 0: only at the end of epochs
    target_accuracy: float | None = None
    average_buffers: bool = False
    check_finite: bool = False
    push_factors: bool = True
    pace: Pace = field(default_factory=Pace)
