"""The rows of the comparison: one command each, its result file, and what docs/results.md says about it."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from echelon.errors import unknown_name

HOSTS = "python -m benchmarks.hosts"
QUICK_TURNS = "--rounds 1 --steps 2 --warmup 1"
QUICK_KEYS = f"--model keys:3:64 {QUICK_TURNS}"


@dataclass(frozen=True, slots=True)
class Target:
    """How many times faster than a peer Echelon should be."""

    peer: str
    ratio: float


@dataclass(frozen=True, slots=True)
class Row:
    """One command, without the flags for its files. `quick` is a short one for tests, which needs no peer's software.

    `seconds` is about how long it takes on two quiet cores. `needs` is a file that it reads and the repository lacks.
    A row that is not `standard` runs only when --only names it; its figures are those of its last run.
    """

    name: str
    block: str
    title: str
    command: str
    quick: str
    seconds: float
    targets: tuple[Target, ...] = ()
    picture: str = ""  # a file of the folder docs that the command draws
    needs: str = ""
    standard: bool = True

    @property
    def file(self) -> str:
        """The name of its result file."""
        return f"{self.name}.json"

    @property
    def uses_hosts(self) -> bool:
        """Whether it runs on namespaces of this machine, which needs root and Debian's packages."""
        return self.command.startswith(HOSTS)

    @property
    def prefix(self) -> str:
        """What stands before the command that its result file names."""
        return f"{self.command.partition(' -- ')[0]} -- " if self.uses_hosts else ""

    def words(self, *, quick: bool) -> list[str]:
        """Return the words of the command."""
        return shlex.split(self.quick if quick else self.command)


def _pushpull(name: str, title: str, flags: str, seconds: float, *targets: Target) -> Row:
    quick = f"echelon bench pushpull {QUICK_KEYS} {flags.replace('--peer mxnet', '')}"
    return Row(name, "pushpull", title, f"echelon bench pushpull {flags} --rounds 8", quick, seconds, targets)


def _io(name: str, title: str, flags: str, *targets: Target, needs: str = "") -> Row:
    quick = f"echelon bench io --images 8 --batch-size 4 --step-batches 1 {QUICK_TURNS}"
    return Row(
        name, "io", title, f"echelon bench io --threads 2 --peer mxnet {flags}".strip(), quick, 55, targets, needs=needs
    )


def _train(name: str, title: str, flags: str, seconds: float, *targets: Target) -> Row:
    quick = "echelon bench train --model resnet20 --batch-size 8 --peer ddp --rounds 2 --steps 4 --warmup 0"
    return Row(name, "train", title, f"echelon bench train {flags}", quick, seconds, targets)


def _hosts(name: str, title: str, rate: str, flags: str) -> Row:
    limit = f" --rate {rate}" if rate else ""
    command = f"{HOSTS}{limit} -- echelon bench {flags} --hosts h1,h2 --transport tcp"
    return Row(name, "hosts", title, command, "", 60, standard=False)


def _one_rate(name: str, title: str, flags: str, seconds: float) -> Row:
    command = f"python -m benchmarks.one_rate {flags}"
    return Row(name, "one-rate", title, command, "", seconds, standard=False)


ROWS = (
    _pushpull(
        "pushpull-shm",
        "`dist_sync`",
        "--kv-store dist_sync --peer gloo --peer mxnet --peer echelon_copy",
        75,
        Target("gloo", 2.5),
        Target("mxnet", 10),
    ),
    _pushpull("pushpull-async", "`dist_async`", "--kv-store dist_async --peer mxnet", 60, Target("mxnet", 10)),
    _pushpull(
        "pushpull-tcp",
        "`dist_sync` over TCP",
        "--kv-store dist_sync --transport tcp --peer gloo --peer mxnet",
        90,
        Target("mxnet", 2.5),
    ),
    _io("io", "images as `im2rec` packs them, generated", "--cached --memory", Target("mxnet", 5)),
    _io("io-plain", "images without restart markers, generated", "--restart-interval 0", Target("mxnet", 5)),
    _io(
        "io-photos",
        "photographs as `im2rec` packs them",
        "--rec data/io/photos.rec",
        Target("mxnet", 5),
        needs="data/io/photos.rec",
    ),
    _io(
        "io-photos-480",
        "photographs, `im2rec --resize 480`",
        "--rec data/io/photos-480.rec",
        Target("mxnet", 5),
        needs="data/io/photos-480.rec",
    ),
    _io(
        "io-photos-plain",
        "photographs without restart markers",
        "--rec data/io/photos-plain.rec",
        Target("mxnet", 5),
        needs="data/io/photos-plain.rec",
    ),
    _train(
        "train-resnet20",
        "ResNet-20",
        "--model resnet20 --peer lazy --peer ddp --peer ddp_tuned --peer mxnet --rounds 6",
        180,
        Target("ddp", 1),
    ),
    _train(
        "train-mlp25m",
        "MLP, 25 million weights",
        "--model mlp25m --peer lazy --peer gradients --peer ddp --peer ddp_tuned --peer mxnet --rounds 6",
        150,
        Target("ddp", 2),
    ),
    _train(
        "train-mlp25m-tcp",
        "MLP, 25 million weights, over TCP",
        "--model mlp25m --transport tcp --peer gradients --peer ddp --rounds 5",
        90,
    ),
    Row(
        "costs",
        "costs",
        "costs of a job",
        "echelon bench costs --starts 5",
        "echelon bench costs --starts 1 --rounds 1 --steps 2 --model keys:3:64",
        70,
    ),
    Row(
        "schemes",
        "schemes",
        "time to 0.95 on digits",
        "echelon bench schemes --seeds 5",
        "echelon bench schemes --seeds 1 --case equal --target 0.2 --pace 0.01 --limit-epochs 1",
        1000,
        picture="schemes.png",
    ),
    _hosts(
        "hosts-pushpull",
        "push-pull over a veth that is not limited",
        "",
        "pushpull -n 1 -s 1 --security proof --peer iperf3 --peer encrypted --rounds 5 --steps 6",
    ),
    _hosts(
        "hosts-pushpull-1g",
        "push-pull over 1 Gbit/s each way",
        "1gbit",
        "pushpull -n 1 -s 1 --security proof --peer iperf3 --peer encrypted --rounds 3 --steps 3 --warmup 1",
    ),
    _hosts(
        "hosts-keys-1g",
        "the same, 200 keys of 0.5 MB, TLS",
        "1gbit",
        "pushpull --model keys:200:131072 -n 1 -s 1 --peer iperf3 --rounds 3 --steps 3 --warmup 1",
    ),
    _hosts(
        "hosts-train-1g",
        "training ResNet-20 over 1 Gbit/s, TLS",
        "1gbit",
        "train --model resnet20 --peer ddp --rounds 4 --steps 8",
    ),
    _one_rate(
        "one-rate-cifar10-digits",
        "",
        "--only 'cifar10 resnet-20' digits --jobs 3 --data-dir data --extra 'cifar10=--gpus 0 --engine graph'",
        1200,
    ),
    _one_rate("one-rate-mnist", "", "--only 'mnist mlp' 'mnist dist_sync_mlp.py' --jobs 4 --data-dir data", 1200),
    _one_rate("one-rate-digits-lr-0.025", "`--lr 0.025`", "--only digits --workers 8 --extra 'digits=--lr 0.025'", 90),
    _one_rate(
        "one-rate-digits-lr-0.0125", "`--lr 0.0125`", "--only digits --workers 8 --extra 'digits=--lr 0.0125'", 90
    ),
)
BLOCKS = tuple(dict.fromkeys(row.block for row in ROWS))


def choose(only: Sequence[str]) -> list[Row]:
    """Return the rows of these names and blocks, in the order of the table; the standard ones if none is given."""
    known = {*BLOCKS, *(row.name for row in ROWS)}
    for wanted in only:
        if wanted not in known:
            raise unknown_name("row or block", wanted, sorted(known))
    return [row for row in ROWS if (row.standard if not only else row.name in only or row.block in only)]


def why_not(row: Row, root: Path) -> str:
    """Return why a row cannot run on this machine; empty if it can."""
    if row.needs and not (root / row.needs).exists():
        return f"{row.needs} does not exist"
    if row.uses_hosts and os.geteuid() != 0:
        return "network namespaces need root"
    if row.uses_hosts and (missing := [name for name in ("sshd", "iperf3") if not _found(name)]):
        return f"{' and '.join(missing)} is not installed; tests/system/install.sh installs sshd, iperf3 is a package"
    return ""


def _found(program: str) -> bool:
    return shutil.which(program, path=f"{os.defpath}:/usr/sbin:/sbin:/usr/local/bin") is not None
