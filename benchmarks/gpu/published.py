"""The published figures that `python -m benchmarks.gpu` compares with.

Both sources used MXNet: a proof of concept of 2017 (version 0.11, ResNets on CIFAR-10, K80 and P100 GPUs, 12 epochs)
and the tables of MXNet's first distributed examples of 2015 (Inception on CIFAR-10, one GTX 980 and a cluster of ten).
With the same batch size and learning rate, a run takes the same steps on one GPU as on eight, except that each GPU has
its own batch statistics. Therefore the number of GPUs of a published accuracy of 2017 does not matter. If several were
published for one setting, the best is the one to reach. The cluster of 2015 had five machines with two GPUs each under
BSP; its batch size is that of a machine.
"""

from __future__ import annotations

from dataclasses import dataclass

K80, P100 = "K80", "P100"
EPOCHS_2017 = 12


@dataclass(frozen=True, slots=True)
class Cell:
    """A row of the tables of 2017: global batch size, accuracy after 12 epochs, and speed."""

    layers: int
    batch: int
    lr: float
    accuracy: float
    gpu: str
    num_gpus: int
    samples_per_s: int


@dataclass(frozen=True, slots=True)
class EpochCell:
    """A row of the single-GPU tables of 2015: validation accuracy after a number of epochs."""

    batch: int
    lr: float
    epochs: int
    accuracy: float


@dataclass(frozen=True, slots=True)
class ClusterCell:
    """A row of the cluster's tables of 2015: accuracies after a number of epochs, by the batch size of a machine."""

    batch: int
    lr: float
    epochs: int
    train_accuracy: float
    accuracy: float


TABLE_2017 = (  # without rows that lack an accuracy or a GPU; 0.05 is the script's default lr
    Cell(110, 128, 0.05, 0.818, K80, 1, 520),
    Cell(50, 512, 0.05, 0.702, K80, 8, 6200),
    Cell(50, 256, 0.05, 0.768, K80, 4, 3600),
    Cell(50, 128, 0.05, 0.817, K80, 2, 1800),
    Cell(50, 512, 0.4, 0.765, K80, 8, 6200),
    Cell(50, 256, 0.2, 0.783, K80, 4, 3600),
    Cell(50, 1024, 0.4, 0.786, K80, 8, 6800),
    Cell(50, 512, 0.2, 0.810, K80, 4, 4300),
    Cell(50, 256, 0.1, 0.779, K80, 2, 2200),
    Cell(50, 128, 0.05, 0.810, K80, 1, 1100),
    Cell(50, 2048, 0.4, 0.722, K80, 8, 9400),
    Cell(50, 1024, 0.2, 0.722, K80, 4, 5100),
    Cell(50, 512, 0.1, 0.760, K80, 2, 2600),
    Cell(50, 256, 0.05, 0.700, K80, 1, 1300),
    Cell(50, 512, 0.05, 0.703, K80, 1, 1400),
    Cell(50, 512, 0.4, 0.796, K80, 1, 1400),
    Cell(50, 4096, 3.2, 0.278, K80, 8, 11000),
    Cell(110, 4096, 0.4, 0.671, P100, 8, 11000),
    Cell(50, 4096, 0.4, 0.604, P100, 8, 24000),
    Cell(50, 4096, 0.8, 0.599, P100, 8, 24000),
    Cell(50, 2048, 0.4, 0.733, P100, 8, 17000),
    Cell(50, 1024, 0.2, 0.733, P100, 4, 15000),
    Cell(50, 512, 0.1, 0.773, P100, 2, 7500),
    Cell(50, 256, 0.05, 0.782, P100, 1, 2600),
    Cell(50, 1024, 0.4, 0.773, P100, 8, 11000),
    Cell(50, 512, 0.2, 0.734, P100, 4, 12000),
    Cell(50, 256, 0.1, 0.767, P100, 2, 6100),
    Cell(50, 128, 0.05, 0.817, P100, 1, 2900),
    Cell(50, 4096, 0.4, 0.611, K80, 8, 10000),
)

TABLE_2015 = (
    EpochCell(256, 0.1, 10, 0.867488),
    EpochCell(256, 0.1, 20, 0.873598),
    EpochCell(128, 0.1, 10, 0.867288),
    EpochCell(128, 0.1, 20, 0.889022),
    EpochCell(128, 0.1, 30, 0.898237),
    EpochCell(128, 0.1, 40, 0.899940),
)

CLUSTER_2015 = (  # five machines with ten GTX 980, BSP
    ClusterCell(512, 0.1, 10, 0.828193, 0.804980),
    ClusterCell(512, 0.1, 20, 0.901002, 0.831250),
    ClusterCell(512, 0.1, 30, 0.938349, 0.860444),
    ClusterCell(512, 0.1, 40, 0.953838, 0.859629),
    ClusterCell(512, 0.4, 10, 0.799032, 0.763262),
    ClusterCell(512, 0.4, 20, 0.903737, 0.847594),
    ClusterCell(512, 0.4, 30, 0.945143, 0.854461),
    ClusterCell(512, 0.4, 40, 0.962789, 0.869531),
    ClusterCell(256, 0.1, 10, 0.863264, 0.824479),
    ClusterCell(256, 0.1, 20, 0.923930, 0.858333),
    ClusterCell(256, 0.1, 30, 0.951104, 0.862540),
    ClusterCell(256, 0.1, 40, 0.968971, 0.873658),
    ClusterCell(256, 0.4, 10, 0.867188, 0.837039),
    ClusterCell(256, 0.4, 20, 0.931913, 0.869331),
    ClusterCell(256, 0.4, 30, 0.959867, 0.874098),
    ClusterCell(256, 0.4, 40, 0.975832, 0.888101),
)
CLUSTER_EPOCH_S = {512: 7, 256: 11}  # seconds of an epoch of that cluster, by the batch size of a machine


def best_cells() -> list[Cell]:
    """Return the most accurate cell of each network, batch size and learning rate of 2017, small networks first."""
    best: dict[tuple[int, int, float], Cell] = {}
    for cell in TABLE_2017:
        key = (cell.layers, cell.batch, cell.lr)
        if key not in best or cell.accuracy > best[key].accuracy:
            best[key] = cell
    return [best[key] for key in sorted(best)]


def fastest_single(layers: int, batch: int) -> Cell | None:
    """Return the fastest published run on one GPU with this network and batch size."""
    cells = [cell for cell in TABLE_2017 if (cell.layers, cell.batch, cell.num_gpus) == (layers, batch, 1)]
    return max(cells, key=lambda cell: cell.samples_per_s, default=None)


def inception_runs() -> dict[tuple[int, float], list[EpochCell]]:
    """Return the cells of 2015 by run, which is a batch size and a learning rate."""
    runs: dict[tuple[int, float], list[EpochCell]] = {}
    for cell in TABLE_2015:
        runs.setdefault((cell.batch, cell.lr), []).append(cell)
    return runs


def cluster_runs() -> dict[tuple[int, float], list[ClusterCell]]:
    """Return the cluster's cells of 2015 by run, in the order of publication."""
    runs: dict[tuple[int, float], list[ClusterCell]] = {}
    for cell in CLUSTER_2015:
        runs.setdefault((cell.batch, cell.lr), []).append(cell)
    return runs
