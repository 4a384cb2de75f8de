"""Names of checkpoint files: the file of each rank and position, the newest valid one, and those to delete.

Names are MXNet's with another suffix: `prefix-0012.safetensors` after 12 epochs, `prefix-3-0012.safetensors` of rank 3,
and in the middle of an epoch `prefix-0012-s0034500.safetensors`, after 34,500 more samples of all processes. A run
directory has its result in `checkpoint.safetensors`. `format` defines the contents of a file, and `saver` decides when
to write one.

A position counts samples and not batches, because a run may be resumed with another batch size or number of processes.
Older versions wrote the batches of a worker instead (`prefix-0012-b00345.safetensors`). Those files are still read, and
the samples are in their metadata.

Positions are comparable only within one run. A run that starts from the beginning or from an older epoch, while newer
files of its prefix exist, starts a new `branch`, a number in the metadata. Files of the highest branch are the newest,
whatever their position.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from echelon.atomic_file import PARTIAL_SUFFIX
from echelon.errors import DataError, UsageError
from echelon.train.checkpoint.format import Checkpoint, Metadata, load, load_metadata
from echelon.train.checkpoint.mxnet import model as mxnet
from echelon.train.checkpoint.mxnet.recognise import Network, Wanted

Prefix: TypeAlias = str | os.PathLike[str]

SUFFIX = ".safetensors"
RESULT_FILE = f"checkpoint{SUFFIX}"  # in a run directory
_POSITION = re.compile(r"-(\d{4,})(?:-s(\d{7,})|-b(\d{5,}))?" + re.escape(SUFFIX))
_UNFINISHED = re.compile(_POSITION.pattern + r"\.(?P<process>\d+)-[0-9a-f]+" + re.escape(PARTIAL_SUFFIX))

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CheckpointName:
    """A file, its position (epochs, samples of the next epoch) and its branch; None if its header is damaged."""

    path: Path
    position: tuple[int, int]
    branch: int | None = 0

    @property
    def is_mid_epoch(self) -> bool:
        """Whether it was saved in the middle of an epoch."""
        return self.position[1] > 0


@dataclass(frozen=True, slots=True)
class ResumeFrom:
    """What a process resumes from: rank 0's checkpoint, its file, and this rank's own checkpoint."""

    rank_0: Checkpoint
    path: Path
    own: Checkpoint


def path_for(prefix: Prefix, rank: int, epoch: int, samples: int = 0) -> Path:
    """Return the file name of a rank's checkpoint; with 0 samples, of the end of an epoch."""
    if rank < 0 or epoch < 0 or samples < 0:
        raise UsageError(f"a checkpoint cannot be of rank {rank}, epoch {epoch}, sample {samples}; they count from 0")
    middle = f"-s{samples:07d}" if samples else ""
    return Path(f"{_rank_prefix(prefix, rank)}-{epoch:04d}{middle}{SUFFIX}")


def find(prefix: Prefix, rank: int = 0) -> list[CheckpointName]:
    """List a rank's files, newest first. Only their headers are read.

    A file with a damaged header counts as one of the newest branch, so that resuming reports it.
    """
    found = [_with_header(name) for name in _listed(prefix, rank)]
    newest = max((name.branch for name in found if name.branch is not None), default=0)
    known = [replace(name, branch=newest) if name.branch is None else name for name in found]
    return sorted(known, key=lambda name: (name.branch or 0, name.position), reverse=True)


def load_newest(prefix: Prefix, rank: int = 0, size: int = 1) -> ResumeFrom | None:
    """Load the newest position that is valid for all of `size` processes; None if the prefix has no checkpoints.

    Damaged checkpoints are skipped with a warning. If all are damaged, raises DataError, which names them: a run that
    started from the beginning would overwrite what may still be restored.
    """
    names, damages = find(prefix), []
    for name in names:
        try:
            return _load_for_all(prefix, name.path, rank, size)
        except DataError as error:
            damages.append(str(error))
            log.warning("skipped a damaged checkpoint: %s", error)
    if damages:
        raise DataError(
            f"none of the {len(names)} checkpoints {prefix}-* can be loaded: {'; '.join(damages)}. Restore one from a "
            "copy; or move them away, or give another prefix, to start from the beginning"
        )
    return None


def load_at(
    prefix: Prefix, epoch: int, *, rank: int = 0, size: int = 1, network: Wanted | Network | None = None
) -> ResumeFrom:
    """Load the end of an epoch; raises DataError, which names every damaged file, unless it is valid for all ranks.

    If only MXNet's file exists (`prefix-0012.params`), it is read as weights of `network`, and all ranks use it.
    """
    path = path_for(prefix, 0, epoch)
    if not path.is_file():
        if theirs := mxnet.find_file(prefix, epoch):
            converted = mxnet.load(theirs, network)
            return ResumeFrom(converted, theirs, converted)
        newest = ", ".join(name.path.name for name in find(prefix)[:5]) or "none"
        raise DataError(f"there is no checkpoint {path}; the newest ones with this prefix: {newest}")
    return _load_for_all(prefix, path, rank, size)


def _load_for_all(prefix: Prefix, path: Path, rank: int, size: int) -> ResumeFrom:
    """Load rank 0's file and the files of the other ranks at its position.

    Each process reads the files of all ranks, so all of them reach the same answer without communication; only rank 0's
    file is large. A rank without a file uses rank 0's. If the number of processes has changed, all ranks use rank 0's.
    """
    rank_0 = own = load(path)
    damaged = []
    for other in range(1, size if rank_0.metadata.get("num_processes", size) == size else 1):
        other_path = Path(_rank_prefix(prefix, other) + path.name.removeprefix(Path(prefix).name))
        try:
            checkpoint = load(other_path) if other_path.is_file() else rank_0
        except DataError as error:
            damaged.append(str(error))
            continue
        if other == rank and _same_save(checkpoint.metadata, rank_0.metadata):
            own = checkpoint
    if damaged:
        raise DataError("; and ".join(damaged))
    return ResumeFrom(rank_0, path, own)


def load_model(model: Prefix, epoch: int | None = None, wanted: Wanted | None = None) -> tuple[Checkpoint, Path]:
    """Load the trained model that a user names: by a checkpoint file, a run directory, or the prefix of several files.

    Returns the checkpoint and its file: of a run directory its result, of a prefix the file of `epoch`, or else the
    newest valid one. A .params file of MXNet, by name or by prefix, is converted; `wanted` says what is known of it.
    """
    checkpoint, path = _load_model(model, epoch, wanted)
    if path.suffix == mxnet.SUFFIX:
        log.info("%s", mxnet.describe(checkpoint, path))
    return checkpoint, path


def _load_model(model: Prefix, epoch: int | None, wanted: Wanted | None) -> tuple[Checkpoint, Path]:
    path = Path(model)
    if (path / RESULT_FILE).is_file():
        path /= RESULT_FILE
    if path.is_file():
        if epoch is not None:
            raise UsageError(f"{model} is one checkpoint; epoch {epoch} can be chosen only from those of a prefix")
        return mxnet.load(path, wanted) if path.suffix == mxnet.SUFFIX else load(path), path
    found = load_newest(model) if epoch is None else load_at(model, epoch, network=wanted)
    if found is None and (theirs := mxnet.find_file(model)):
        return mxnet.load(theirs, wanted), theirs
    if found is None:
        here = f"the folder {model} has no {RESULT_FILE}" if path.is_dir() else f"there is no file {model}"
        raise DataError(
            f"{here}, and no valid checkpoint {path.name}-0001{SUFFIX}, 0002, … in {path.absolute().parent}; give a "
            "checkpoint file, a run folder such as runs/latest, or a prefix"
        )
    return found.rank_0, found.path


def prune(prefix: Prefix, written: Path, ranks: Sequence[int] = (0,)) -> None:
    """Delete the mid-epoch files of some ranks that the file `written` replaces: older ones of the same branch.

    `written` is never deleted. Of its own rank another file stays, in case that `written` is damaged later: the newest
    of those that it replaces, if there is no end of an epoch. Also deletes the temporary files of processes that were
    killed while they saved.
    """
    replaced: list[CheckpointName] = []
    written_name = next((one for rank in ranks for one in _listed(prefix, rank) if one.path == written), None)
    if written_name is not None:
        newest = _with_header(written_name)
        for rank in ranks:
            listed = list(_listed(prefix, rank))
            found = [_with_header(name) for name in listed if name.is_mid_epoch]
            older = sorted((one for one in found if _is_replaced(one, newest)), key=lambda name: name.position)
            has_spare = any(name.path != written and not name.is_mid_epoch for name in listed)
            replaced += older if has_spare or written_name not in listed else older[:-1]
    unfinished = [path for rank in ranks for path in _unfinished(prefix, rank)]
    for path in [name.path for name in replaced] + unfinished:
        path.unlink(missing_ok=True)


def _is_replaced(name: CheckpointName, newest: CheckpointName) -> bool:
    return name.path != newest.path and name.branch == newest.branch and name.position <= newest.position


def _rank_prefix(prefix: Prefix, rank: int) -> str:
    return f"{os.fspath(prefix)}-{rank}" if rank else os.fspath(prefix)


def _listed(prefix: Prefix, rank: int) -> Iterator[CheckpointName]:
    """Yield a rank's files without opening them: of an older version's mid-epoch file, the position is in batches."""
    own = Path(_rank_prefix(prefix, rank))
    for path, match in _matching(own.parent, own.name, _POSITION):
        epoch, samples, batches = (int(number or 0) for number in match.groups())
        old_name = f"{own.name}-{epoch:04d}-b{batches:05d}{SUFFIX}"
        if path.name in (path_for(prefix, rank, epoch, samples).name, old_name):  # not names with extra zeros
            yield CheckpointName(path, (epoch, samples or batches), None)


def _with_header(name: CheckpointName) -> CheckpointName:
    """Add what the header of the file says: the branch, and the samples of a name with batches."""
    try:
        metadata = load_metadata(name.path)
    except DataError:
        return name
    epoch, count = name.position
    samples = metadata.get("samples_done", count) if count else 0
    return replace(name, position=(epoch, samples), branch=metadata.get("branch", 0))


def _same_save(one: Metadata, other: Metadata) -> bool:
    """Return whether two ranks saved together: at the same position of the same run, as far as both files say."""
    shared = [name for name in ("branch", "epoch", "samples_done", "num_processes") if name in one and name in other]
    return all(one[name] == other[name] for name in shared)


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
    return [path for path, match in found if int(match["process"]) != os.getpid()]
