"""A process group: the processes, one per device, that run collectives together.

The members find each other at a store (`rendezvous.py`) and communicate through torch.distributed, which uses NCCL
between GPUs and Gloo between CPUs (`world.py`). A group of one process needs neither. With Gloo the sums are computed
here, in rank order and in float32 or wider, from the parts that an all-to-all delivers. This moves as many bytes as a
ring does, and the result does not depend on the order of arrival.

Values on another device than the group's are copied there and back: those of processes that share a GPU, whose group
is on the CPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from echelon.errors import UsageError
from echelon.kvstore.collective.rendezvous import Rendezvous
from echelon.kvstore.collective.world import WORLDS, World

POLL_S = 0.001
SMALL = 4096  # elements; a tensor up to this size is all-gathered whole, which saves one message
# torch 2.13 renamed these functions and warns about the old names.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Reduction:
    """A collective operation in flight. `result()` waits for it and returns its tensor; call it once."""

    def __init__(self, finish: Callable[[], Tensor]) -> None:
        self.result = finish


class ProcessGroup:
    """This process as a member of a group. All members must make the same calls in the same order.

    `device` is the one whose memory the collectives use: this process's, or the CPU if it shares its GPU with a member.
    """

    def __init__(self, device: torch.device, rendezvous: Rendezvous | None = None) -> None:
        self.device = device
        self.rank, self.size = (rendezvous.rank, rendezvous.size) if rendezvous is not None else (0, 1)
        self._names = rendezvous.names if rendezvous is not None else ["worker 0"]
        self._timeout_s = rendezvous.timeout_s if rendezvous is not None else 0.0
        self._num_texts = 0
        self._num_gathers = 0
        self._world: World | None = None
        self._torch_group: Any = None
        self._store: Store | None = None  # for texts
        if rendezvous is not None and self.size > 1:
            self._world = WORLDS.join(device, rendezvous)
            self._torch_group, self._store = self._world.open_group()
            if self._world.backend == "gloo":
                self.device = torch.device("cpu")

    @property
    def broken(self) -> bool:
        """Whether an operation has failed because a member died or did not take part."""
        return self._world is not None and self._world.broken

    @property
    def _gloo(self) -> bool:
        return self.device.type == "cpu"

    def is_beside(self, other: ProcessGroup) -> bool:
        """Return whether another group is open, and has the same members."""
        return self._world is not None and self._world is other._world

    def reduce_scatter(self, flat: Tensor) -> Reduction:
        """Sum a flat tensor over all members and return this rank's part. Its length is a multiple of the size."""
        if self.size == 1 or not flat.numel():
            return Reduction(lambda: flat[: flat.numel() // self.size].to(wide(flat.dtype)))
        if self._is_elsewhere(flat):
            return _moved(self.reduce_scatter(flat.to(self.device)), flat.device)
        if not self._gloo:
            sent = flat.to(wide(flat.dtype))
            part = sent.new_empty(flat.numel() // self.size)
            return self._start(
                "a sum", lambda: _reduce_scatter(part, sent, group=self._torch_group, async_op=True), lambda: part
            )
        received = torch.empty_like(flat)

        def all_to_all() -> Any:
            return dist.all_to_all_single(as_bytes(received), as_bytes(flat), group=self._torch_group, async_op=True)

        return self._start("a sum", all_to_all, lambda: _sum_in_rank_order(received.view(self.size, -1)))

    def all_reduce(self, flat: Tensor) -> Reduction:
        """Sum a flat tensor over all members. The input may be overwritten."""
        if self.size == 1 or not flat.numel():
            return Reduction(lambda: flat.to(wide(flat.dtype)))
        if self._is_elsewhere(flat):
            return _moved(self.all_reduce(flat.to(self.device)), flat.device)
        if not self._gloo:
            total = flat.to(wide(flat.dtype))
            return self._start(
                "a sum", lambda: dist.all_reduce(total, group=self._torch_group, async_op=True), lambda: total
            )
        if flat.numel() <= SMALL or flat.numel() % self.size:
            gathered = self.all_gather(flat, flat.new_empty(self.size, flat.numel()))
            return Reduction(lambda: _sum_in_rank_order(gathered.result().view(self.size, -1)))
        part = self.reduce_scatter(flat)
        return Reduction(lambda: self._gather_parts(part.result(), flat))

    def all_gather(self, part: Tensor, out: Tensor) -> Reduction:
        """Copy the parts of all members, in rank order, into `out`."""
        if self.size == 1 or not out.numel():
            return Reduction(lambda: out.copy_(part))
        if self._is_elsewhere(out):
            here = torch.empty(out.shape, dtype=out.dtype, device=self.device)
            gathered = self.all_gather(part.to(self.device), here)
            return Reduction(lambda: out.copy_(gathered.result()))
        sent = part.clone() if self._gloo else part  # it may be a view of `out`
        return self._start(
            "an all-gather",
            lambda: _all_gather(as_bytes(out), as_bytes(sent), group=self._torch_group, async_op=True),
            lambda: out,
        )

    def broadcast(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        """Overwrite the tensors with the values of one rank."""
        if self.size == 1:
            return
        with self._naming_failures("a broadcast"):
            for tensor in tensors:
                moved = tensor.detach().to(self.device).contiguous()
                if moved.numel():
                    dist.broadcast(as_bytes(moved), source, group=self._torch_group)
                tensor.detach().copy_(moved)

    def barrier(self, flag: float = 0.0) -> float:
        """Wait for all members, and return the sum of their flags."""
        return float(self.all_reduce(torch.tensor([flag], device=self.device)).result())

    def check_same(self, what: str, own: str) -> None:
        """Raise UsageError if this member's text differs from rank 0's."""
        if self._store is None:
            return
        self._num_texts += 1
        key = f"same/{self._num_texts}"
        if self.rank == 0:
            self.set_text(key, own)
        elif (first := self.get_text(key)) != own:
            raise UsageError(
                f"{self._names[self.rank]}: {what} must be the same on all: {self._names[0]} has {first}, "
                f"this process has {own}"
            )

    def set_text(self, key: str, text: str) -> None:
        """Store a text for the other members."""
        if self._store is not None:
            with self._naming_failures("the group's store"):
                self._store.set(key, text)

    def get_text(self, key: str) -> str:
        """Return a text that another member stores, and wait for it if necessary."""
        assert self._store is not None
        with self._naming_failures("the group's store"):
            deadline = time.monotonic() + self._timeout_s
            while not self._store.check([key]):  # `get` would wait with a lock that threads of other groups need
                if time.monotonic() > deadline:
                    raise RuntimeError(f"nobody has stored {key!r} in {self._timeout_s:g} s")
                time.sleep(POLL_S)
            return bytes(self._store.get(key)).decode()

    def gather_texts(self, own: str) -> list[str]:
        """Return the texts of all members, by rank."""
        if self._store is None:
            return [own]
        self._num_texts += 1
        self.set_text(f"text/{self._num_texts}/{self.rank}", own)
        return [self.get_text(f"text/{self._num_texts}/{rank}") for rank in range(self.size)]

    def gather_bytes(self, own: bytes) -> dict[int, bytes | memoryview]:
        """Return the parts of all members that have not called `stop_gathering`, by rank.

        They go through the group's store and not through torch.distributed, where a member that has retired may be in
        another collective.
        """
        if self._store is None:
            return {self.rank: own}
        self._num_gathers += 1
        with self._naming_failures("an exchange of values"):
            store: Any = self._store  # its annotations allow str only
            store.set(f"gather/{self._num_gathers}/{self.rank}", own)
            # Everybody sent its part of the last round after it had read all parts of the round before.
            self._store.delete_key(f"gather/{self._num_gathers - 2}/{self.rank}")
            parts = {rank: self._part_of(rank, self._num_gathers) for rank in range(self.size)}
        return {rank: part for rank, part in parts.items() if part is not None}

    def stop_gathering(self) -> None:
        """Tell the others not to wait for this member in `gather_bytes`."""
        self.set_text(f"gather stopped/{self.rank}", "")

    def _part_of(self, rank: int, number: int) -> bytes | None:
        """Return a member's part when it has sent it; None if it has stopped gathering without sending it."""
        assert self._store is not None
        key = f"gather/{number}/{rank}"
        deadline = time.monotonic() + self._timeout_s
        while not self._store.check([key]):
            if self._store.check([f"gather stopped/{rank}"]) and not self._store.check([key]):
                return None
            if time.monotonic() > deadline:
                raise RuntimeError(f"{self._names[rank]} has sent nothing in {self._timeout_s:g} s")
            time.sleep(POLL_S)
        return bytes(self._store.get(key))

    def close(self, *, failed: bool = False) -> None:
        """Leave the group. `failed`: this process ends with an error, so it waits for nobody."""
        if self._store is not None:
            assert self._world is not None
            self._store = self._torch_group = None
            self._world.close_group(failed=failed)

    def _is_elsewhere(self, tensor: Tensor) -> bool:
        return tensor.device.type != self.device.type

    def _start(self, what: str, start: Callable[[], Any], finish: Callable[[], Tensor]) -> Reduction:
        with self._naming_failures(what):
            work = start()

        def result() -> Tensor:
            with self._naming_failures(what):
                work.wait()
            return finish()

        return Reduction(result)

    def _gather_parts(self, part: Tensor, flat: Tensor) -> Tensor:
        out = flat if flat.dtype == part.dtype else part.new_empty(flat.numel())
        return self.all_gather(part, out).result()

    @contextmanager
    def _naming_failures(self, what: str) -> Iterator[None]:
        """Turn an error of torch.distributed into a JobError that names this process and the operation."""
        assert self._world is not None
        with self._world.naming_failures(what):
            yield


def _moved(reduction: Reduction, device: torch.device) -> Reduction:
    return Reduction(lambda: reduction.result().to(device))


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which values of `dtype` are summed and stored."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the same memory as bytes, because back ends cannot transfer every dtype."""
    return tensor.detach().view(-1).view(torch.uint8)


def _sum_in_rank_order(rows: Tensor) -> Tensor:
    total = rows[0].to(wide(rows.dtype))
    for row in rows[1:]:
        total += row
    return total
