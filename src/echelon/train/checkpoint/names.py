"""Names of checkpoint files: the file of each rank and position, the newest valid one, and those to delete.

Names are MXNet's with another suffix: `prefix-0012.safetensors` after 12 epochs, `prefix-3-0012.safetensors` of rank 3,
and in the middle of an epoch `prefix-0012-b00345.safetensors`, after 345 more batches of that worker. A run directory
has its result in `checkpoint.safetensors`. `format` defines the contents of a file, and `saver` decides when to write
one.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from echelon.atomic_file import PARTIAL_SUFFIX
from echelon.errors import DataError, UsageError
from echelon.train.checkpoint.format import Checkpoint, load

Prefix: TypeAlias = str | os.PathLike[str]

SUFFIX = ".safetensors"
RESULT_FILE = f"checkpoint{SUFFIX}"  # in a run directory
_POSITION = re.compile(r"-(\d{4,})(?:-b(\d{5,}))?" + re.escape(SUFFIX))
_UNFINISHED = re.compile(_POSITION.pattern + r"\.(\d+)-[0-9a-f]+" + re.escape(PARTIAL_SUFFIX))

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CheckpointName:
    """A file, and its position (epochs, batches): saved after that many whole epochs and batches of the next one."""

    path: Path
    position: tuple[int, int]


@dataclass(frozen=True, slots=True)
class ResumeFrom:
    """What a process resumes from: rank 0's checkpoint, its file, and this rank's own checkpoint."""

    rank_0: Checkpoint
    path: Path
    own: Checkpoint


def path_for(prefix: Prefix, rank: int, epoch: int, batch: int = 0) -> Path:
    """Return the file name of a rank's checkpoint; with batch 0, of the end of an epoch."""
    if rank < 0 or epoch < 0 or batch < 0:
        raise UsageError(f"a checkpoint cannot be of rank {rank}, epoch {epoch}, batch {batch}; they count from 0")
    middle = f"-b{batch:05d}" if batch else ""
    return Path(f"{_rank_prefix(prefix, rank)}-{epoch:04d}{middle}{SUFFIX}")


def find(prefix: Prefix, rank: int = 0) -> list[CheckpointName]:
    """List a rank's files, newest first, without opening them."""
    own = Path(_rank_prefix(prefix, rank))
    found = []
    for path, match in _matching(own.parent, own.name, _POSITION):
        epoch, batch = int(match[1]), int(match[2] or 0)
        if path == path_for(prefix, rank, epoch, batch):  # Echelon does not write names with extra zeros
            found.append(CheckpointName(path, (epoch, batch)))
    return sorted(found, key=lambda name: name.position, reverse=True)


def load_newest(prefix: Prefix, rank: int = 0, size: int = 1) -> ResumeFrom | None:
    """Load the newest position that is valid for all of `size` processes; None if there is none.

    Damaged checkpoints are skipped with a warning.
    """
    for name in find(prefix):
        try:
            return load_at(prefix, *name.position, rank=rank, size=size)
        except DataError as error:
            log.warning("skipped a damaged checkpoint: %s", error)
    return None


def load_at(prefix: Prefix, epoch: int, batch: int = 0, *, rank: int = 0, size: int = 1) -> ResumeFrom:
    """Load one position; raises DataError, which names every damaged file, unless it is valid for all processes.

    Each process reads the files of all ranks, so all of them reach the same answer without communication; only rank 0's
    file is large. A rank without a file uses rank 0's. If the number of processes has changed, all ranks use rank 0's.
    """
    path = path_for(prefix, 0, epoch, batch)
    if not path.is_file():
        newest = ", ".join(name.path.name for name in find(prefix)[:5]) or "none"
        raise DataError(f"there is no checkpoint {path}; the newest ones with this prefix: {newest}")
    rank_0 = own = load(path)
    damaged = []
    for other in range(1, size if rank_0.metadata.get("num_processes", size) == size else 1):
        other_path = path_for(prefix, other, epoch, batch)
        try:
            checkpoint = load(other_path) if other_path.is_file() else rank_0
        except DataError as error:
            damaged.append(str(error))
            continue
        own = checkpoint if other == rank else own
    if damaged:
        raise DataError("; and ".join(damaged))
    return ResumeFrom(rank_0, path, own)


def load_model(model: Prefix, epoch: int | None = None) -> tuple[Checkpoint, Path]:
    """Load the trained model that a user names: by a checkpoint file, a run directory, or the prefix of several files.

    Returns the checkpoint and its file: of a run directory its result, of a prefix the file of `epoch`, or else the
    newest valid one.
    """
    path = Path(model)
    if (path / RESULT_FILE).is_file():
        path /= RESULT_FILE
    if path.is_file():
        if epoch is not None:
            raise UsageError(f"{model} is one checkpoint; epoch {epoch} can be chosen only from those of a prefix")
        return load(path), path
    found = load_newest(model) if epoch is None else load_at(model, epoch)
    if found is None:
        here = f"the folder {model} has no {RESULT_FILE}" if path.is_dir() else f"there is no file {model}"
        raise DataError(
            f"{here}, and no valid checkpoint {path.name}-0001{SUFFIX}, 0002, … in {path.absolute().parent}; give a "
            "checkpoint file, a run folder such as runs/latest, or a prefix"
        )
    return found.rank_0, found.path


def prune(prefix: Prefix, rank: int = 0) -> None:
    """Delete a rank's mid-epoch files, except the newest if no end of an epoch is newer.

    Also deletes the temporary files of processes that were killed while they saved.
    """
    names = find(prefix, rank)
    deleted = [name.path for name in names[1:] if name.position[1]] + _unfinished(prefix, rank)
    for path in deleted:
        path.unlink(missing_ok=True)


def _rank_prefix(prefix: Prefix, rank: int) -> str:
    return f"{os.fspath(prefix)}-{rank}" if rank else os.fspath(prefix)


def _matching(folder: Path, start: str, rest: re.Pattern[str]) -> Iterator[tuple[Path, re.Match[str]]]:
    """Yield the files of a folder whose name is `start` followed by a match of the pattern."""
    for name in os.listdir(folder) if folder.is_dir() else ():
        match = rest.fullmatch(name, len(start)) if name.startswith(start) else None
        if match is not None:
            yield folder / name, match


def _unfinished(prefix: Prefix, rank: int) -> list[Path]:
    """List a rank's temporary files that an earlier process left behind."""
    own = Path(_rank_prefix(prefix, rank))
    found = _matching(own.parent, f".{own.name}", _UNFINISHED)
    return [path for path, match in found if int(match[3]) != os.getpid()]
