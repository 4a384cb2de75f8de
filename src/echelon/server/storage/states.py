"""The optimizer states of a server's keys, in the form in which they travel: named tensors, one frame each.

A state of the key's shape travels in the pieces that the server stores. Numbers (the step, NAdam's mu_product) and
whatever an optimizer class keeps for a whole key travel as they are. Python's numbers become tensors of 0 dimensions:
int64, float64 or bool.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from echelon.cluster.messages import StateEntry
from echelon.cluster.placement import MAX_DIMENSIONS, MAX_LENGTH, Layout, Slot, join
from echelon.errors import UsageError
from echelon.server.optimizer.class_kernels import State, WholeClass
from echelon.server.optimizer.kernel import Kernel, Progress, Step
from echelon.server.storage.execute import Storage
from echelon.server.storage.lanes import Lanes
from echelon.server.storage.memory import TORCH_DTYPES
from echelon.server.storage.optimization import Optimization

_DTYPES = {**TORCH_DTYPES, "bool": torch.bool}
_UNFIT = "the optimizer states do not fit the keys and the optimizer of this job"
_MAX_STEP = 1 << 53
_STEP_OF_UNCOUNTED = 1  # any count above 0: the next step is not the first one


class ServerStates:
    """Reads and replaces the states of all keys of one server."""

    def __init__(self, layout: Layout, rank: int, storage: Storage, optimization: Optimization) -> None:
        self._layout = layout
        self._rank = rank
        self._storage = storage
        self._optimization = optimization

    def get(self, lanes: Lanes) -> tuple[list[StateEntry], list[memoryview]]:
        """Return the states of all keys that were updated, and their frames."""
        entries: list[StateEntry] = []
        frames: list[memoryview] = []
        for key in sorted(lanes.all()):
            kernel = self._optimization.kernel(key)
            if kernel is None:
                continue
            numbers: set[str] = set()
            if isinstance(kernel, WholeClass):
                state = self._storage.objects.get(key, {})
                found = _of_object(self._layout.slots[key], state)
                numbers = {name for name, value in state.items() if not isinstance(value, Tensor)}
            else:
                found = self._in_pieces(key, kernel, self._optimization.progress(lanes.lane_of(key), key))
            for name, tensor, start in found:
                is_number = name in numbers
                entries.append(StateEntry(key, name, dtype_name(tensor), tuple(tensor.shape), start, is_number))
                frames.append(as_frame(tensor.clone()))
        return entries, frames

    def put(self, lanes: Lanes, entries: Sequence[StateEntry], frames: Sequence[memoryview]) -> None:
        """Replace all states. A key without entries has none, as if it had never been updated."""
        if len(entries) != len(frames) or any(entry.key not in lanes for entry in entries):
            raise UsageError(_UNFIT)
        tensors = [from_frame(entry, frame) for entry, frame in zip(entries, frames, strict=True)]
        places = [self._place(entry) for entry in entries]
        given: dict[int, dict[str, Tensor]] = {}
        for entry, tensor in zip(entries, tensors, strict=True):
            given.setdefault(entry.key, {})[entry.name] = tensor
        updated = [key for key in lanes.all() if self._optimization.kernel(key) is not None]
        progress = {key: self._progress(key, given.get(key, {})) for key in updated}
        of_classes = {key: own for key, own in given.items() if isinstance(self._optimization.kernel(key), WholeClass)}
        shapes = {key: self._layout.slots[key].spec.shape for key in of_classes}
        objects = self._tried(
            {key: as_values(own, shapes[key]) for key, own in of_classes.items()}
        )  # nothing has changed so far, and from here on nothing fails
        self._write(updated, tensors, places, objects)
        for made in dict.fromkeys(progress.values()):  # keys of a lane may not have the same any more
            lanes.resolve([key for key, its in progress.items() if its == made], pushed=False)
        for key, made in progress.items():
            self._optimization.set_progress(lanes.lane_of(key), key, made)

    def fill(self, entries: Sequence[StateEntry], frames: Sequence[memoryview]) -> None:
        """Write the tensors of states that a server has sent or saved. Raise UsageError if they do not fit.

        What the optimizer has done with the keys is restored otherwise.
        """
        tensors = [from_frame(entry, frame) for entry, frame in zip(entries, frames, strict=True)]
        given: dict[int, State] = {}
        for entry, tensor in zip(entries, tensors, strict=True):
            if isinstance(self._optimization.kernel(entry.key), WholeClass):
                given.setdefault(entry.key, {})[entry.name] = tensor.item() if entry.is_number else tensor
        self._write((), tensors, [self._place(entry) for entry in entries], self._tried(given))

    def _write(
        self,
        cleared: Sequence[int],
        tensors: Sequence[Tensor],
        places: Sequence[Tensor | None],
        objects: Mapping[int, State],
    ) -> None:
        self._clear(cleared)
        self._storage.objects.update(objects)
        for tensor, place in zip(tensors, places, strict=True):
            if place is not None:
                place.copy_(tensor)

    def _in_pieces(self, key: int, kernel: Kernel, made: Progress) -> Iterator[tuple[str, Tensor, int | None]]:
        """Yield name, tensor and position of every piece of a state, after the numbers."""
        names = sorted(made.states)
        if names:
            numbers = {"step": float(made.step), **dict(made.numbers)}
            for name in kernel.scalar_names:
                yield name, torch.tensor(numbers[name]), None
        for name in names:
            for start, state in self._stored(key, name):
                yield name, state, start

    def _stored(self, key: int, name: str) -> list[tuple[int, Tensor]]:
        """Return the parts of a state on this server, each with its first element. A table is one part."""
        if key in self._storage.tables:
            return [(0, self._storage.tables[key].state([name])[0])]
        slot = self._layout.slots[key]
        pieces = self._layout.pieces(slot, self._rank, exact=True)
        return [(piece.start - slot.start, self._storage.states(piece, [name])[0]) for piece in pieces]

    def _place(self, entry: StateEntry) -> Tensor | None:
        """Return where a piece of a state is stored, or None for what is not stored in pieces."""
        kernel = self._optimization.kernel(entry.key)
        if entry.start is None:
            if isinstance(kernel, WholeClass) or (kernel and not entry.shape and entry.name in kernel.scalar_names):
                return None
            raise UsageError(_UNFIT)
        if kernel is not None and entry.name in kernel.possible_states:
            for start, place in self._stored(entry.key, entry.name):
                if (start, place.shape, dtype_name(place)) == (entry.start, entry.shape, entry.dtype):
                    return place
        raise UsageError(_UNFIT)

    def _clear(self, keys: Sequence[int]) -> None:
        self._storage.objects.clear()
        for key in keys:
            if key in self._storage.tables:
                self._storage.tables[key].clear_states()
                continue
            for piece in self._layout.pieces(self._layout.slots[key], self._rank):
                self._storage.clear_states(piece)

    def _progress(self, key: int, given: Mapping[str, Tensor]) -> Progress:
        """Return what the states of a key say. Raise UsageError if they cannot be those of an optimizer."""
        kernel = self._optimization.kernel(key)
        assert kernel is not None
        if isinstance(kernel, WholeClass) or not given:
            return Progress()
        if not given.keys() >= set(kernel.scalar_names):
            raise UsageError(_UNFIT)
        numbers = {name: float(given[name]) for name in kernel.scalar_names}
        step = numbers.pop("step", float(_STEP_OF_UNCOUNTED))
        if not 0 <= step <= _MAX_STEP or not all(map(math.isfinite, numbers.values())):
            raise UsageError(_UNFIT)
        states = frozenset(given) - set(kernel.scalar_names)
        return Progress(
            int(step), states, tuple((name, numbers[name]) for name in kernel.scalar_names if name in numbers)
        )

    def _tried(self, objects: dict[int, State]) -> dict[int, State]:
        """Return states of optimizer classes, by key. Raise UsageError if a step with one of them fails."""
        for key, state in objects.items():
            kernel, slot = self._optimization.kernel(key), self._layout.slots[key]
            assert isinstance(kernel, WholeClass)
            for piece in join(self._layout.pieces(slot, self._rank, exact=True)):
                weights = self._storage.weights(piece).clone().view(slot.spec.shape)
                step = Step(Progress(), float(kernel.options.get("lr", 0.0)))
                try:
                    kernel.update_object(weights, torch.zeros_like(weights), copy.deepcopy(state), step)
                except Exception as error:
                    raise UsageError(f"{_UNFIT}: {error}") from error
        return objects


def _of_object(slot: Slot, state: Mapping[str, Any]) -> Iterator[tuple[str, Tensor, int | None]]:
    for name, value in state.items():
        if value is not None:
            yield name, as_tensor(value, f"state {name!r} of key {slot.spec.name!r}"), None


def as_tensor(value: Any, what: str) -> Tensor:
    """Return a tensor or number of an optimizer's state as a tensor. Anything else raises UsageError."""
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, bool | int):
        return torch.tensor(value, device="cpu")
    if isinstance(value, float):
        return torch.tensor(value, dtype=torch.float64, device="cpu")
    raise UsageError(f"{what} is a {type(value).__name__}; only tensors and numbers can be sent or saved")


def as_values(state: Mapping[str, Tensor], shape: Sequence[int]) -> dict[str, Any]:
    """Return the state of a parameter as its class keeps it: `as_tensor` backwards."""
    return {name: _as_value(name, tensor) if len(shape) else tensor for name, tensor in state.items()}


def _as_value(name: str, tensor: Tensor) -> Any:
    """Return the number that a tensor stands for, or the tensor. A float64 `step` is torch's, by its default dtype."""
    if tensor.ndim or tensor.dtype not in (torch.int64, torch.float64, torch.bool):
        return tensor
    return tensor if (name, tensor.dtype) == ("step", torch.float64) else tensor.item()


def dtype_name(tensor: Tensor) -> str:
    """Return the name of a tensor's dtype in messages."""
    return str(tensor.dtype).removeprefix("torch.")


def as_frame(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor, to send."""
    if dtype_name(tensor) not in _DTYPES:
        raise UsageError(f"a state of {dtype_name(tensor)} cannot be sent; use one of {', '.join(_DTYPES)}")
    flat = tensor.cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"\0")  # no frame is empty


def from_frame(entry: StateEntry, frame: memoryview) -> Tensor:
    """Return a received state."""
    dtype = _DTYPES.get(entry.dtype)
    count = math.prod(entry.shape)
    largest = math.prod(filter(None, entry.shape))  # torch does not make an empty tensor of an impossible shape
    fits = min(entry.shape, default=0) >= 0 and len(entry.shape) <= MAX_DIMENSIONS and largest <= MAX_LENGTH
    if dtype is None or not fits or len(frame) != max(1, dtype.itemsize * count):
        raise UsageError(_UNFIT)
    if not count:
        return torch.empty(entry.shape, dtype=dtype, device="cpu")
    return torch.frombuffer(bytearray(frame), dtype=dtype).view(entry.shape)
