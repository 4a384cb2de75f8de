"""The processes that reduce together, one a device: who they are, and what they can do with a tensor.

They meet at a store (`meeting.py`) and talk through torch.distributed: NCCL between GPUs, Gloo between CPUs. A group of
one needs none of it. With Gloo sums are made here, in rank order and in float32 or wider, from what an all-to-all
brings: the same bytes on the wire as a ring, and the same bits whatever comes first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from echelon.errors import JobError, UsageError
from echelon.kvstore.collective.rendezvous import Meeting, gist, meet
from echelon.transport.allocator import keep_freed_memory

FAREWELL_S = 5.0
LINGER_S = 1.0  # whoever broke the group should be gone before those that only noticed: the launcher names the first
SMALL = 4096  # elements that go whole to everybody: one message less
# torch 2.13 calls these by new names, and warns of the old ones.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Pending:
    """A reduction under way; `result` waits for it, once."""

    def __init__(self, finish: Callable[[], Tensor]) -> None:
        self.result = finish


class Group:
    """This process among those that reduce together. All must make the same calls in the same order."""

    def __init__(self, device: torch.device, meeting: Meeting | None = None) -> None:
        self.device = device
        self.rank, self.size = (meeting.rank, meeting.size) if meeting is not None else (0, 1)
        self._names = meeting.names if meeting is not None else ["worker 0"]
        self._broken = False
        self._agreed = 0
        self._store: Store | None = None
        if meeting is not None and self.size > 1:
            self._store = meet(meeting)
            self._timeout_s = meeting.timeout_s
            self._join()

    @property
    def broken(self) -> bool:
        """Whether something that needed all has failed: one of them is gone, or did not come."""
        return self._broken

    @property
    def _gloo(self) -> bool:
        return self.device.type == "cpu"

    def reduce_scatter(self, flat: Tensor) -> Pending:
        """The sum over all of this rank's part of a flat tensor, whose length is a multiple of the group's size."""
        if self.size == 1 or not flat.numel():
            return Pending(lambda: flat[: flat.numel() // self.size].to(wide(flat.dtype)))
        if not self._gloo:
            sent = flat.to(wide(flat.dtype))
            part = sent.new_empty(flat.numel() // self.size)
            return self._pending("a sum", lambda: _reduce_scatter(part, sent, async_op=True), lambda: part)
        received = torch.empty_like(flat)

        def exchange() -> Any:
            return dist.all_to_all_single(as_bytes(received), as_bytes(flat), async_op=True)

        return self._pending("a sum", exchange, lambda: _in_rank_order(received.view(self.size, -1)))

    def all_reduce(self, flat: Tensor) -> Pending:
        """The sum over all of a flat tensor, which may be overwritten."""
        if self.size == 1 or not flat.numel():
            return Pending(lambda: flat.to(wide(flat.dtype)))
        if not self._gloo:
            total = flat.to(wide(flat.dtype))
            return self._pending("a sum", lambda: dist.all_reduce(total, async_op=True), lambda: total)
        if flat.numel() <= SMALL or flat.numel() % self.size:
            return self._gathered(flat)
        part = self.reduce_scatter(flat)
        return Pending(lambda: self._assembled(part.result(), flat))

    def all_gather(self, part: Tensor, out: Tensor) -> Pending:
        """Everybody's parts, one after the other, in `out`."""
        if self.size == 1 or not out.numel():
            return Pending(lambda: out.copy_(part))
        sent = part.clone() if self._gloo else part  # it may be a piece of `out`
        return self._pending(
            "a gathering", lambda: _all_gather(as_bytes(out), as_bytes(sent), async_op=True), lambda: out
        )

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Rank 0's values, in place."""
        if self.size == 1:
            return
        with self._naming("a broadcast"):
            for tensor in tensors:
                moved = tensor.detach().to(self.device).contiguous()
                if moved.numel():
                    dist.broadcast(as_bytes(moved), 0)
                tensor.detach().copy_(moved)

    def meet(self, flag: float = 0.0) -> float:
        """Wait until all are here; returns the sum of their flags."""
        return float(self.all_reduce(torch.tensor([flag], device=self.device)).result())

    def agree(self, what: str, mine: str) -> None:
        """Refuse to go on with something else than rank 0 has."""
        if self._store is None:
            return
        self._agreed += 1
        if self.rank == 0:
            self.tell(f"agree/{self._agreed}", mine)
        elif (first := self.told(f"agree/{self._agreed}")) != mine:
            raise UsageError(
                f"{self._names[self.rank]}: {what} must be the same on all: {self._names[0]} has {first}, "
                f"here is {mine}"
            )

    def tell(self, key: str, text: str) -> None:
        """Leave a word for the others."""
        if self._store is not None:
            with self._naming("the group's store"):
                self._store.set(key, text)

    def told(self, key: str) -> str:
        """Another's word, once it is there."""
        assert self._store is not None
        with self._naming("the group's store"):
            return bytes(self._store.get(key)).decode()

    def gather_texts(self, mine: str) -> list[str]:
        """Everybody's word, by rank."""
        if self._store is None:
            return [mine]
        self._agreed += 1
        self.tell(f"word/{self._agreed}/{self.rank}", mine)
        return [self.told(f"word/{self._agreed}/{rank}") for rank in range(self.size)]

    def close(self, *, failed: bool = False) -> None:
        """Leave. Rank 0, who hosts the store, leaves last, but does not wait for the dead, nor when it has `failed`."""
        store, self._store = self._store, None
        if store is None:
            return
        dist.destroy_process_group()
        if failed or self._broken:
            return
        try:
            store.set(f"bye/{self.rank}", "")
            if self.rank == 0:
                store.wait([f"bye/{rank}" for rank in range(self.size)], timedelta(seconds=FAREWELL_S))
        except RuntimeError:
            pass  # the host is gone already, or somebody never came here: there is nothing left to do together

    def _join(self) -> None:
        if dist.is_initialized():
            raise UsageError(
                f"worker {self.rank}: this process is in a group of torch.distributed already; close the other store "
                "(or destroy_process_group) before making one"
            )
        assert self._store is not None
        device = None if self._gloo else self.device
        if device is not None:
            torch.cuda.set_device(device)
        else:
            keep_freed_memory()  # what comes in has its buffers only for a moment
        with self._naming("the start of torch.distributed"):
            dist.init_process_group(
                "gloo" if self._gloo else "nccl",
                store=PrefixStore("echelon", self._store),
                rank=self.rank,
                world_size=self.size,
                timeout=timedelta(seconds=self._timeout_s),
                device_id=device,
            )
            # Another may not have seen its end of a connection yet: who left now would break it.
            self._store.set(f"joined/{self.rank}", "")
            self._store.wait([f"joined/{rank}" for rank in range(self.size)], timedelta(seconds=self._timeout_s))

    def _pending(self, what: str, start: Callable[[], Any], finish: Callable[[], Tensor]) -> Pending:
        with self._naming(what):
            work = start()

        def result() -> Tensor:
            with self._naming(what):
                work.wait()
            return finish()

        return Pending(result)

    def _gathered(self, flat: Tensor) -> Pending:
        everybodys = flat.new_empty(self.size, flat.numel())
        pending = self.all_gather(flat, everybodys)
        return Pending(lambda: _in_rank_order(pending.result().view(self.size, -1)))

    def _assembled(self, part: Tensor, flat: Tensor) -> Tensor:
        out = flat if flat.dtype == part.dtype else part.new_empty(flat.numel())
        return self.all_gather(part, out).result()

    @contextmanager
    def _naming(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            self._broken = True
            time.sleep(LINGER_S)
            raise JobError(
                f"{self._names[self.rank]}: {what} of {self.size} processes failed: one of them died, failed, or did "
                f"not come in time ({gist(error)})"
            ) from error


def wide(dtype: torch.dtype) -> torch.dtype:
    """In what sums are made and values are kept."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def as_bytes(tensor: Tensor) -> Tensor:
    """The same memory: what only moves has no need of a type, and back ends do not know them all."""
    return tensor.detach().view(-1).view(torch.uint8)


def _in_rank_order(rows: Tensor) -> Tensor:
    total = rows[0].to(wide(rows.dtype))
    for row in rows[1:]:
        total += row
    return total
