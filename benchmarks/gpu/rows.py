"""The training commands that `python -m benchmarks.gpu` runs, and their targets.

A row is one command as a user types it. Speed rows measure samples per second and run alone. The others may run at the
same time. Accuracy rows measure the validation accuracy after some epochs, cluster rows that of five workers with two
devices each, and scheme rows the time until a validation accuracy. Speed rows give the engine, because a short run
would not switch to compiled steps, while the full command does.

The workers of cluster and scheme rows share one GPU, and so do the two devices of a worker (`--gpus 0,0`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from benchmarks.gpu.published import EPOCHS_2017, Cell, best_cells, cluster_runs, fastest_single, inception_runs
from echelon.errors import unknown_name

Kind = Literal["speed", "accuracy", "cluster", "schemes"]
KINDS: tuple[Kind, ...] = ("speed", "accuracy", "cluster", "schemes")
STEPS_OF_IMAGENET = 1200  # of about 10,000 in an epoch; gives eleven speed lines of 100 batches
ENGINE = "--engine compile"  # what the full command switches to
INCEPTION = "--network inception-bn-28-small"
TARGET = 0.85  # the validation accuracy that scheme rows run to
SEEDS = (0, 1)


@dataclass(frozen=True, slots=True)
class Bar:
    """The accuracy to reach after a number of epochs, and the hardware that it was published for."""

    epochs: int
    accuracy: float
    source: str


@dataclass(frozen=True, slots=True)
class Row:
    """One command. `target` is in samples/s or, with `against`, a fraction of that row's speed."""

    name: str
    kind: Kind
    script: str
    arguments: str
    launch: str = ""  # arguments of `echelon launch`, if the command starts with it
    target: float | None = None
    against: str | None = None
    published: str = ""
    bars: tuple[Bar, ...] = ()
    to_accuracy: float | None = None  # of a scheme row, whose time until then is measured
    setting: tuple[int, float] | None = None  # of a cluster row: the batch size of a worker, and the learning rate
    store: str = ""  # of a cluster or scheme row

    @property
    def reads_data(self) -> bool:
        """Whether the command takes a --data-dir."""
        return "--benchmark 1" not in self.arguments


def gpu_rows() -> list[Row]:
    """Return all rows for one GPU, in the order of running."""
    single = [*imagenet_rows(), *cifar_rows(), *store_rows(), *inception_rows(), *resnet_rows()]
    return [*single, *cluster_rows(), *scheme_rows()]


def imagenet_rows() -> list[Row]:
    """Return ResNet-50 on synthetic images in float16, with a short epoch."""
    return [
        Row(
            f"imagenet-resnet50-{batch}",
            "speed",
            "train_imagenet.py",
            f"--gpu 0 --batch-size {batch} --num-epochs 1 --disp-batches 100 --network resnet-v1 --num-layers 50 "
            f"--dtype float16 --benchmark 1 --num-examples {STEPS_OF_IMAGENET * batch} {ENGINE}",
            target=target,
        )
        for batch, target in ((128, 6800), (256, 7350))
    ]


def cifar_rows() -> list[Row]:
    """Return ResNets on CIFAR-10 in the automatic precision, and two in float32 for comparison."""
    targets = {(50, 128): 37_000, (50, 512): 71_000}
    auto = [_cifar(layers, batch, targets.get((layers, batch))) for layers in (50, 110) for batch in (128, 512)]
    return [*auto, *(_cifar(50, batch, None, "float32") for batch in (128, 512))]


def _cifar(layers: int, batch: int, target: float | None, dtype: str | None = None) -> Row:
    cell = fastest_single(layers, batch)
    suffix, flag = (f"-{dtype}", f" --dtype {dtype}") if dtype else ("", "")
    return Row(
        f"cifar-resnet{layers}-{batch}{suffix}",
        "speed",
        "train_cifar10.py",
        f"{_resnet(layers, batch)} --num-epochs 3{flag} {ENGINE}",
        target=target,
        published=f"{cell.samples_per_s:,} ({_where(cell)})" if cell else "",
    )


def store_rows() -> list[Row]:
    """Return a worker without servers, and the same worker with one server."""
    common = f"{_resnet(50, 512)} --num-epochs 3 {ENGINE} --kv-store"
    return [
        Row("store-local-512", "speed", "train_cifar10.py", f"{common} local"),
        Row(
            "store-dist-sync-512",
            "speed",
            "train_cifar10.py",
            f"{common} dist_sync",
            launch="-n 1 -s 1",
            target=0.9,
            against="store-local-512",
        ),
    ]


def resnet_rows() -> list[Row]:
    """Return one run per setting of 2017, to compare with the best published accuracy."""
    return [
        Row(
            f"resnet{cell.layers}-{cell.batch}-{cell.lr:g}",
            "accuracy",
            "train_cifar10.py",
            f"{_resnet(cell.layers, cell.batch)} --lr {cell.lr:g} --num-epochs {EPOCHS_2017}",
            bars=(Bar(EPOCHS_2017, cell.accuracy, _where(cell)),),
        )
        for cell in best_cells()
    ]


def inception_rows() -> list[Row]:
    """Return one run per setting of 2015. The longest run also gives the figures after fewer epochs."""
    return [
        Row(
            f"inception-{batch}-{lr:g}",
            "accuracy",
            "train_cifar10.py",
            f"--gpus 0 {INCEPTION} --batch-size {batch} --lr {lr:g} --num-epochs {cells[-1].epochs}",
            bars=tuple(Bar(cell.epochs, cell.accuracy, "GTX 980") for cell in cells),
        )
        for (batch, lr), cells in sorted(inception_runs().items())
    ]


def cluster_rows(num_epochs: int | None = None) -> list[Row]:
    """Return one run per scheme and setting of the cluster of 2015: five workers with two devices each.

    The figures are published for BSP (`dist_sync`); the same are shown beside the other schemes. `num_epochs`: as many
    instead of the published ones, and without targets, to find out how long an epoch takes.
    """
    return [
        Row(
            f"{'probe' if num_epochs else 'cluster'}-{store}-{batch}-{lr:g}",
            "cluster",
            "train_cifar10.py",
            f"--gpus 0,0 {INCEPTION} --batch-size {batch} --lr {lr:g} --num-epochs {num_epochs or cells[-1].epochs} "
            f"{flags} --disp-batches 1000",
            launch="-n 5 -s 2",
            bars=() if num_epochs else tuple(Bar(cell.epochs, cell.accuracy, "10 × GTX 980") for cell in cells),
            setting=(batch, lr),
            store=store,
        )
        for store, flags in _stores("0,1,2/3,4").items()
        for (batch, lr), cells in cluster_runs().items()
    ]


def scheme_rows() -> list[Row]:
    """Return runs to one accuracy under the four schemes. One of four workers is threefold slower.

    `--pace` gives all steps one duration, whatever other processes do on the GPU at the same time.
    """
    return [
        Row(
            f"slow-{store}-{seed}",
            "schemes",
            "train_cifar10.py",
            f"--gpus 0 {INCEPTION} --batch-size 128 --lr 0.1 --num-epochs 40 {flags} --pace 0.1 --slow 3:3 "
            f"--target-accuracy {TARGET} --eval-every 49 --seed {seed} --disp-batches 1000",
            launch="-n 4 -s 2",
            to_accuracy=TARGET,
            store=store,
        )
        for seed in SEEDS
        for store, flags in _stores("0,1,2/3").items()
    ]


def _stores(groups: str) -> dict[str, str]:
    """Return the flags of the four schemes, by store."""
    names = {"dist_sync": "", "dist_async": "", "dist_ssync": " --staleness 3", "dist_gsync": f" --groups {groups}"}
    return {store: f"--kv-store {store}{flags}" for store, flags in names.items()}


def probe_rows() -> list[Row]:
    """Return short runs of the cluster's settings, to find out how long an epoch takes."""
    return cluster_rows(num_epochs=3)


def tiny_rows() -> list[Row]:
    """Return rows that take seconds on a CPU and need no data files, to test this program."""
    common = (
        "--devices cpu --benchmark 1 --network mlp --num-examples 64 --batch-size 4 --num-epochs 2 --disp-batches 5"
    )
    return [
        Row("tiny-local", "speed", "train_cifar10.py", f"{common} --kv-store local"),
        Row(
            "tiny-dist-sync",
            "speed",
            "train_cifar10.py",
            f"{common} --kv-store dist_sync",
            launch="-n 1 -s 1",
            target=0.01,
            against="tiny-local",
        ),
    ]


LISTS = {"gpu": gpu_rows, "probe": probe_rows, "tiny": tiny_rows}


def choose(rows: Sequence[Row], only: Sequence[str]) -> list[Row]:
    """The rows of those kinds and names; all if none is given."""
    known = {*KINDS, *(row.name for row in rows)}
    for wanted in only:
        if wanted not in known:
            raise unknown_name("row or kind of rows", wanted, sorted(known))
    return [row for row in rows if not only or row.kind in only or row.name in only]


def _resnet(layers: int, batch: int) -> str:
    return f"--gpus 0 --network resnet --num-layers {layers} --batch-size {batch}"


def _where(cell: Cell) -> str:
    return f"{cell.num_gpus} × {cell.gpu}" if cell.num_gpus > 1 else cell.gpu
