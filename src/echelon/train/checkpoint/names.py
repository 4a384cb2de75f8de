"""Checkpoints by name: where a worker's files are, which is the newest good one, and which are no longer needed.

Names are MXNet's with another suffix: `prefix-0012.safetensors` after 12 epochs, `prefix-3-0012.safetensors` of rank 3,
and in the middle of an epoch `prefix-0012-b00345.safetensors`, 345 of that worker's batches later. What is in a file is
`snapshot_files`' matter; when to save is the training loop's.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from echelon.atomic_file import PARTIAL_SUFFIX
from echelon.errors import DataError, UsageError
from echelon.train.checkpoint.format import Snapshot, load, save

__all__ = [
    "Found",
    "Snapshot",
    "SnapshotName",
    "capture_rng",
    "find",
    "load",
    "load_common",
    "load_latest",
    "load_point",
    "locate",
    "path_for",
    "prune",
    "restore_rng",
    "save",
]

Prefix: TypeAlias = str | os.PathLike[str]

SUFFIX = ".safetensors"
_POINT = re.compile(r"-(\d{4,})(?:-b(\d{5,}))?" + re.escape(SUFFIX))
_UNFINISHED = re.compile(_POINT.pattern + r"\.(\d+)-[0-9a-f]+" + re.escape(PARTIAL_SUFFIX))
_CPU_RNG, _CUDA_RNG = "rng.cpu", "rng.cuda"


@dataclass(frozen=True, slots=True)
class SnapshotName:
    """A file, and the point it was taken at: `epoch` epochs and `batch` batches of this worker; 0 is an epoch's end."""

    path: Path
    rank: int
    epoch: int
    batch: int

    @property
    def point(self) -> tuple[int, int]:
        """What files of one worker are ordered by."""
        return self.epoch, self.batch


def path_for(prefix: Prefix, rank: int, epoch: int, batch: int | None = None) -> Path:
    """The name of a worker's file; without a batch, or with batch 0, that of an epoch's end."""
    if rank < 0 or epoch < 0 or (batch or 0) < 0:
        raise UsageError(f"no checkpoint is of rank {rank}, epoch {epoch}, batch {batch}; they count from 0")
    middle = f"-b{batch:05d}" if batch else ""
    return Path(f"{_own_prefix(prefix, rank)}-{epoch:04d}{middle}{SUFFIX}")


def find(prefix: Prefix, rank: int = 0) -> list[SnapshotName]:
    """A worker's files that are there, newest first; whether they are good is not looked at."""
    own = Path(_own_prefix(prefix, rank))
    found = []
    for path, match in _matching(own.parent, own.name, _POINT):
        epoch, batch = int(match[1]), int(match[2] or 0)
        if path == path_for(prefix, rank, epoch, batch):  # with needless zeros it is none of ours
            found.append(SnapshotName(path, rank, epoch, batch))
    return sorted(found, key=lambda one: one.point, reverse=True)


def locate(prefix: Prefix, rank: int, epoch: int, batch: int | None = None) -> Path:
    """The file a worker goes on from at a point: its own, or rank 0's where it has none."""
    paths = [path_for(prefix, owner, epoch, batch) for owner in dict.fromkeys((rank, 0))]
    for path in paths:
        if path.is_file():
            return path
    there = ", ".join(one.path.name for one in find(prefix)[:5]) or "none"
    raise DataError(f"there is no checkpoint {' or '.join(map(str, paths))}; the newest of this prefix: {there}")


def load_latest(prefix: Prefix, rank: int = 0, log: logging.Logger | None = None) -> tuple[Snapshot, Path] | None:
    """The newest good snapshot and its file, or None; bad ones are warned of and passed over.

    A worker without a file of its own uses rank 0's.
    """
    log = log or logging.getLogger(__name__)
    for candidate in _candidates(prefix, rank):
        try:
            return load(candidate.path), candidate.path
        except DataError as error:
            log.warning("passed over a bad checkpoint: %s", error)
    return None


@dataclass(frozen=True, slots=True)
class Found:
    """What a process goes on from: rank 0's snapshot, its file, and the snapshot that is the process's own."""

    first: Snapshot
    path: Path
    own: Snapshot


def load_common(prefix: Prefix, rank: int, size: int, log: logging.Logger | None = None) -> Found | None:
    """The newest point that is good for all of `size` processes, or None; bad ones are warned of and passed over."""
    log = log or logging.getLogger(__name__)
    for candidate in find(prefix):
        try:
            return load_point(prefix, rank, size, *candidate.point)
        except DataError as error:
            log.warning("passed over a bad checkpoint: %s", error)
    return None


def load_point(prefix: Prefix, rank: int, size: int, epoch: int, batch: int | None = None) -> Found:
    """A point, if all of `size` processes can go on from it; DataError names every file of it that is bad.

    Each process reads the files of all ranks, which are small but for rank 0's: so all come to the same answer, without
    a word between them. A rank without a file uses rank 0's, and so do all after a run of another number of processes.
    """
    path = locate(prefix, 0, epoch, batch)
    first = own = load(path)
    bad = []
    for other in range(1, size if first.facts.get("num_processes", size) == size else 1):
        theirs = path_for(prefix, other, epoch, batch)
        try:
            snapshot = load(theirs) if theirs.is_file() else first
        except DataError as error:
            bad.append(str(error))
            continue
        own = snapshot if other == rank else own
    if bad:
        raise DataError("; and ".join(bad))
    return Found(first, path, own)


def prune(prefix: Prefix, keep: int = 1, rank: int = 0) -> list[Path]:
    """Delete a worker's mid-epoch files from before its newest end of an epoch, and all but `keep` after it.

    What a process left that was killed while it saved is deleted too.
    """
    if keep < 0:
        raise UsageError(f"cannot keep {keep} checkpoints; give 0 or more")
    names = find(prefix, rank)
    newest_end = max((one.epoch for one in names if not one.batch), default=-1)
    middles = [one for one in names if one.batch]
    needed = [one for one in middles if one.epoch >= newest_end][:keep]
    gone = [one.path for one in middles if one not in needed] + _left_unfinished(prefix, rank)
    for path in gone:
        path.unlink(missing_ok=True)
    return gone


def capture_rng(device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """The states of torch's random numbers, for `Snapshot.extra`: the processor's, and a GPU's where one is used."""
    states = {_CPU_RNG: torch.get_rng_state()}
    if torch.device(device).type == "cuda":
        states[_CUDA_RNG] = torch.cuda.get_rng_state(device)
    return states


def restore_rng(states: Mapping[str, Tensor], device: torch.device | str = "cpu") -> None:
    """Set what `capture_rng` took; a state that is missing, or of a GPU not used now, is left alone."""
    if _CPU_RNG in states:
        torch.set_rng_state(states[_CPU_RNG])
    if _CUDA_RNG in states and torch.device(device).type == "cuda":
        torch.cuda.set_rng_state(states[_CUDA_RNG], device)


def _own_prefix(prefix: Prefix, rank: int) -> str:
    return f"{os.fspath(prefix)}-{rank}" if rank else os.fspath(prefix)


def _matching(folder: Path, start: str, rest: re.Pattern[str]) -> Iterator[tuple[Path, re.Match[str]]]:
    """The files of a folder whose name is `start` and then as the pattern has it."""
    for name in os.listdir(folder) if folder.is_dir() else ():
        match = rest.fullmatch(name, len(start)) if name.startswith(start) else None
        if match is not None:
            yield folder / name, match


def _left_unfinished(prefix: Prefix, rank: int) -> list[Path]:
    """A worker's temporary files that another process, its predecessor, began."""
    own = Path(_own_prefix(prefix, rank))
    found = _matching(own.parent, f".{own.name}", _UNFINISHED)
    return [path for path, match in found if int(match[3]) != os.getpid()]


def _candidates(prefix: Prefix, rank: int) -> list[SnapshotName]:
    """What a worker may go on from, best first.

    Unequal workers stop in the middle of an epoch at different batches. There a worker's own file is better than rank
    0's, even if that is some batches further.
    """
    names = find(prefix, rank) + (find(prefix) if rank else [])
    return sorted(names, key=lambda one: (one.epoch, one.batch > 0, one.rank == rank, one.batch), reverse=True)
