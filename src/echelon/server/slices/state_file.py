"""The optimizer state of a slice in a file, which a server writes in the background and a new server reads.

It is written every `EVERY_S` seconds: the tensors are copied between two requests, and a thread writes them. The file
appears completely or not at all, and ends with a digest.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from xxhash import xxh3_128

from echelon.atomic_file import AtomicFile
from echelon.cluster.messages import StateEntry
from echelon.cluster.placement import Slot
from echelon.errors import UsageError
from echelon.server.shard.shard import Shard

EVERY_S = 30.0
_MAGIC = b"echelon state 2\n"


class SavedState(NamedTuple):
    """The optimizer states of a shard, what the optimizer has done with each key, and the keys' versions."""

    entries: Sequence[StateEntry]
    frames: Sequence[memoryview]
    progress: Mapping[int, Any]  # by key, as Optimization.to_plain has it by lane
    versions: Mapping[int, int]

    def fits(self, slots: Mapping[int, Slot]) -> bool:
        """Return whether all keys of the state exist."""
        return all(entry.key in slots for entry in self.entries)


class _Head(msgspec.Struct):
    entries: list[StateEntry]
    sizes: list[int]
    progress: dict[int, Any]
    versions: dict[int, int]


def state_of(shard: Shard) -> SavedState | None:
    """Return a copy of the optimizer's state of a shard; None if it has none."""
    requests = shard.requests
    if requests is None or not shard.optimization.has_optimizer:
        return None
    entries, frames = shard.states.get(requests.lanes)
    by_lane = shard.optimization.to_plain()
    keys = list(requests.lanes.all())
    lane_of = {key: requests.lanes.lane_of(key) for key in keys}
    versions = {key: requests.engine.version(lane) for key, lane in lane_of.items()}
    return SavedState(entries, frames, {key: by_lane[lane_of[key]] for key in keys}, versions)


def write(path: Path, state: SavedState) -> None:
    """Write a state."""
    sizes = [len(frame) for frame in state.frames]
    head = msgspec.msgpack.encode(_Head(list(state.entries), sizes, dict(state.progress), dict(state.versions)))
    digest = xxh3_128(head)
    path.parent.mkdir(parents=True, exist_ok=True)
    with AtomicFile(path) as file:
        file.stream.write(_MAGIC + len(head).to_bytes(8, "big") + head)
        for frame in state.frames:
            digest.update(frame)
            file.stream.write(frame)
        file.stream.write(digest.digest())


def read(path: Path) -> SavedState | None:
    """Read a state; None if there is no file, or if it is damaged."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    start = len(_MAGIC) + 8
    if not data.startswith(_MAGIC):
        return None
    end = start + int.from_bytes(data[len(_MAGIC) : start], "big")
    if xxh3_128(data[start:-16]).digest() != data[-16:]:
        return None
    head = msgspec.msgpack.decode(data[start:end], type=_Head)
    view, frames = memoryview(data), []
    for size in head.sizes:
        frames.append(view[end : end + size])
        end += size
    return SavedState(head.entries, frames, head.progress, head.versions)


class StateFiles:
    """The files of one server process: one for each slice and store."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._written_at: dict[tuple[int, int], float] = {}
        self._thread: threading.Thread | None = None
        self.failure: str | None = None  # why the last file could not be written

    def read(self, slice_number: int, store: int) -> SavedState | None:
        """Read the file of a slice and store, if there is one."""
        return None if self._folder is None else read(self._path(slice_number, store))

    def write_if_due(self, slice_number: int, store: int, shard: Shard, now: float) -> None:
        """Write the state of a shard in the background, unless that was done lately or a thread is still writing."""
        place = slice_number, store
        last = self._written_at.setdefault(place, now)
        if self._folder is None or now - last < EVERY_S or (self._thread is not None and self._thread.is_alive()):
            return
        self._written_at[place] = now
        try:
            state = state_of(shard)
        except UsageError as error:  # the optimizer class keeps something that cannot be saved
            if self.failure is None:
                print(
                    f"the optimizer's state is not saved: {error}; if this server is lost, the state is, too",
                    file=sys.stderr,
                    flush=True,
                )
            self.failure = str(error)
            return
        if state is not None:
            path = self._path(slice_number, store)
            self._thread = threading.Thread(target=self._write, args=(path, state), name="echelon-state", daemon=True)
            self._thread.start()

    def _write(self, path: Path, state: SavedState) -> None:
        try:
            write(path, state)
            self.failure = None
        except OSError as error:
            self.failure = f"{path}: {error.strerror or error}"

    def _path(self, slice_number: int, store: int) -> Path:
        assert self._folder is not None
        return self._folder / f"slice-{slice_number}-store-{store}.state"
