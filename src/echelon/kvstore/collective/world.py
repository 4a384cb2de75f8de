"""torch.distributed in this process. It starts with the first process group of this process, and ends with the last.

Stores without servers that exist at the same time, as those of two Trainers, have one world and a torch process group
each. Their collectives do not mix, whatever the order in which the ranks reach them.

NCCL moves values between GPUs, Gloo between CPUs. NCCL refuses two processes on one GPU, so Gloo also serves members
that share one (`--gpus 0,0`): their values then go through the CPU's memory.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from echelon.errors import JobError, UsageError
from echelon.kvstore.collective.rendezvous import Rendezvous, first_sentence, open_store
from echelon.system import keep_freed_memory

log = logging.getLogger(__name__)

Backend = Literal["nccl", "gloo"]
LEAVE_S = 5.0
LINGER_S = 1.0  # a process that only noticed a failure exits after the one that caused it, which the launcher names


class World:
    """All members of a rendezvous. They create their process groups in the same order."""

    def __init__(self, device: torch.device, rendezvous: Rendezvous) -> None:
        self.broken = False  # whether an operation has failed because a member died or did not take part
        self._rendezvous = rendezvous
        self._timeout = timedelta(seconds=rendezvous.timeout_s)
        self._num_groups = 0
        self._open = 0
        self._store = open_store(rendezvous)
        self._join(device)

    @property
    def is_closed(self) -> bool:
        """Whether the last group was closed."""
        return self._num_groups > 0 and self._open == 0

    def open_group(self) -> tuple[Any, Store]:
        """Return a torch process group of all members, and a store for texts of that group."""
        number = self._num_groups
        self._num_groups += 1
        self._open += 1
        store = PrefixStore(f"group {number}", self._store)
        if number == 0:
            return dist.group.WORLD, store
        with self.naming_failures("the start of another process group"):
            return dist.new_group(timeout=self._timeout), store

    def close_group(self, *, failed: bool) -> None:
        """Leave torch.distributed, if this was the last group.

        Rank 0 hosts the store, so it leaves last. It does not wait if a group is broken or this process has `failed`.
        """
        self._open -= 1
        if self._open:
            return
        dist.destroy_process_group()
        if not (failed or self.broken):
            self._wait_for_members()
        # A host that is kept would go on to accept connections, which then are missing in the next world's store.
        del self._store

    def _wait_for_members(self) -> None:
        rank, size = self._rendezvous.rank, self._rendezvous.size
        try:
            self._store.set(f"left/{rank}", "")
            if rank == 0:
                self._store.wait([f"left/{member}" for member in range(size)], timedelta(seconds=LEAVE_S))
        except RuntimeError:
            pass  # the host has left already, or a member failed before it came here: nothing is left to wait for

    @contextmanager
    def naming_failures(self, what: str) -> Iterator[None]:
        """Turn an error of torch.distributed into a JobError that names this process and the operation."""
        try:
            yield
        except RuntimeError as error:
            self.broken = True
            time.sleep(LINGER_S)
            raise JobError(
                f"{self._rendezvous.name}: {what} of {self._rendezvous.size} processes failed: one of them died, "
                f"failed, or did not take part in time ({first_sentence(error)})"
            ) from error

    def _join(self, device: torch.device) -> None:
        rank, size = self._rendezvous.rank, self._rendezvous.size
        if dist.is_initialized():
            raise UsageError(
                f"worker {rank}: this process already has a torch.distributed process group that Echelon did not "
                "create; call destroy_process_group before creating this store"
            )
        with self.naming_failures("the start of torch.distributed"):
            self.backend = choose_backend(self._gather_gpus(device))
            if self.backend == "gloo":
                keep_freed_memory()  # receive buffers are allocated and freed in every step
                if device.type != "cpu" and rank == 0:
                    log.info("processes of this run share a GPU, which NCCL refuses: Gloo sums in the CPU's memory")
            dist.init_process_group(
                self.backend,
                store=PrefixStore("echelon", self._store),
                rank=rank,
                world_size=size,
                timeout=self._timeout,
                device_id=device if self.backend == "nccl" else None,
            )
            # Another member may not have accepted its end of a connection yet. Leaving now would break that connection.
            self._store.set(f"joined/{rank}", "")
            self._store.wait([f"joined/{member}" for member in range(size)], self._timeout)

    def _gather_gpus(self, device: torch.device) -> list[str]:
        """Select this process's GPU. Return the identity of every member's GPU, by rank; none if they have CPUs."""
        if device.type == "cpu":
            return []
        torch.cuda.set_device(device)
        rank, size = self._rendezvous.rank, self._rendezvous.size
        keys = [f"gpu/{member}" for member in range(size)]
        self._store.set(keys[rank], str(torch.cuda.get_device_properties(device).uuid))
        self._store.wait(keys, self._timeout)
        return [bytes(self._store.get(key)).decode() for key in keys]


def choose_backend(gpus: Sequence[str]) -> Backend:
    """Return the back end of members with these GPUs, by identity; without GPUs, that of CPUs."""
    return "nccl" if gpus and len(set(gpus)) == len(gpus) else "gloo"


class Worlds:
    """The open world of this process: torch.distributed supports one."""

    def __init__(self) -> None:
        self._world: tuple[torch.device, Rendezvous, World] | None = None

    def join(self, device: torch.device, rendezvous: Rendezvous) -> World:
        """Return the open world of these members, or start one."""
        if self._world is not None:
            other_device, other, world = self._world
            if not world.is_closed:
                if (other_device, other) == (device, rendezvous):
                    return world
                raise UsageError(
                    f"{rendezvous.name}: this process has an open store of {other.size} processes on {other_device}, "
                    f"and cannot create one of {rendezvous.size} on {device} beside it; close the other one first"
                )
        world = World(device, rendezvous)
        self._world = device, rendezvous, world
        return world


WORLDS = Worlds()
