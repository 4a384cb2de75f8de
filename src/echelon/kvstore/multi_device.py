"""The store of a worker with several devices: one process a device, and to the servers they are one worker.

Device 0 alone is known to the scheduler and the servers. What the devices push is summed between them, by collectives,
and leaves as one push; what comes back goes on to all. All devices of a worker make the same calls in the same order.
What device 0 knows of the job (who lives, whether to stop) the others hear at the end of a step and in `barrier`, and
device 0 itself goes by what it has told: the devices of a worker decide alike, or they would wait for each other.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from echelon.cluster.messages import OptimizerSpec
from echelon.cluster.placement import KeySpec
from echelon.kvstore.arguments import Key, Keys, Values, as_keys
from echelon.kvstore.collective.process_group import Group
from echelon.kvstore.servers.store import ServerStore
from echelon.kvstore.store import KVStore
from echelon.observe.events import EventLog

HALT = "halt"


class MultiDeviceStore(KVStore):
    """Made by `echelon.kvstore.create`. `served` is device 0's connection to the servers, None on the others."""

    def __init__(self, name: str, group: Group, served: ServerStore | None, *, check_finite: bool = False) -> None:
        events = EventLog(None, "worker", 0) if served is None else served.events  # device 0 reports for the worker
        super().__init__(name, events, check_finite=check_finite, sums_replace=name == "dist_sync")
        self.group = group
        self.served = served
        self.on_retire: Callable[[], None] = lambda: None
        self.on_closed: Callable[[], None] = lambda: None
        self._known: dict[Key, KeySpec] = {}
        self._asked = False
        self._news = ""
        self._news_number = 0
        self._worker = 0
        self._workers: list[int] = []
        self._halted: str | None = None
        self.share_news()

    # --- who and where

    @property
    def rank(self) -> int:
        """This process's number among all devices of all workers."""
        return self._worker * self.group.size + self.group.rank

    @property
    def worker_rank(self) -> int:
        """The number of the worker that this device belongs to."""
        return self._worker

    @property
    def workers(self) -> list[int]:
        """The ranks of all devices of the workers that live, in order."""
        devices = range(self.group.size)
        return [worker * self.group.size + device for worker in self._workers for device in devices]

    @property
    def halted(self) -> str | None:
        """Why a worker asked everybody to stop training, or None."""
        return self._halted

    @property
    def halt_flag(self) -> float:
        """1 if this device has something to ask for: to be summed over the worker's devices."""
        return float(self._asked)

    def pass_on(self, total: float) -> None:
        """The sum of the devices' `halt_flag`: what one of them asked for, device 0 asks of everybody, once."""
        if total and self.served is not None and not self._asked:
            self.halt(self.group.told(HALT))

    def share_news(self) -> None:
        """What device 0 knows of the job, to all devices. All call it."""
        if self.served is not None:
            news = json.dumps([self.served.rank, self.served.workers, self.served.halted])
            if news != self._news:
                self._news_number += 1
                self.group.tell(f"news/{self._news_number}", news)
                self._news = news
        number = torch.tensor([self._news_number], device=self.group.device)
        self.group.broadcast([number])
        if int(number) != self._news_number:
            self._news_number = int(number)
            self._news = self.group.told(f"news/{self._news_number}")
        self._worker, self._workers, self._halted = json.loads(self._news)

    # --- the calls

    def push(self, key: Keys, value: Values, priority: int = 0) -> None:
        """Sum over the worker's devices, and send that on its way."""
        sums = [self._summed(tensor) for tensor in self._checked(key, value)]
        if self.served is not None:
            self.served.push(key, sums)

    def pull(self, key: Keys, out: Values, priority: int = 0) -> None:
        """Wait until the scheme lets this worker go on, then copy the weights into `out` (every tensor of a list)."""
        outs = self._targets(key, out)
        firsts = [tensors[0].detach() for tensors in outs]
        if self.served is not None:
            self.served.pull(as_keys(key), firsts)
        self.group.broadcast(firsts)
        for first, tensors in zip(firsts, outs, strict=True):
            for tensor in tensors[1:]:
                tensor.detach().copy_(first)

    def pushpull(self, key: Keys, value: Values, out: Values | None = None, priority: int = 0) -> None:
        """Push, then pull; without `out`, the weights replace the pushed values."""
        target = value if out is None else out
        self._targets(key, target)
        self.push(key, value, priority)
        self.pull(key, target, priority)

    def _use_optimizer(self, spec: OptimizerSpec) -> None:
        """Run this optimizer on the servers."""
        self.group.agree("the optimizer", str(spec))
        if self.served is not None:
            self.served.use_optimizer(spec)
        self.optimizer_spec = spec

    def _retire(self) -> None:
        """Push no more; waits until all devices of the worker have come to that, and takes part with nothing."""
        self.on_retire()
        if self.served is not None:
            self.served.retire()

    def _barrier(self) -> None:
        """Wait until all devices of all living workers are here."""
        self.pass_on(self.group.meet(self.halt_flag))
        if self.served is not None:
            self.served.barrier()
        self.share_news()

    def _halt(self, reason: str) -> None:
        """Ask every worker to stop training; a device that is not the first asks in the next barrier or step."""
        if self._asked:
            return
        self._asked = True
        if self.served is not None:
            self.served.halt(reason)
        else:
            self.group.tell(HALT, reason)

    def save_optimizer_states(self, path: str | Path) -> None:
        """Write the servers' optimizer state to a file, on device 0; on others nothing. Call it on one worker."""
        if self.served is not None:
            self.served.save_optimizer_states(path)

    def load_optimizer_states(self, path: str | Path) -> None:
        """Give the servers a state, on device 0; on others nothing. Call it on one worker, then a barrier."""
        if self.served is not None:
            self.served.load_optimizer_states(path)

    def close(self, *, failed: bool = False) -> None:
        """Leave the servers and the other devices. Harmless when done twice."""
        if self._closed:
            return
        self._closed = True
        try:
            if self.served is not None and not failed:
                self.served.close("one of its devices died or failed" if self.group.broken else None)
        finally:
            self.group.close(failed=failed)
            self.on_closed()

    # --- within

    def _summed(self, tensor: Tensor) -> Tensor:
        flat = tensor.to(self.group.device, copy=True).reshape(-1)
        return self.group.all_reduce(flat).result().view(tensor.shape).to(tensor.dtype)

    def _names(self) -> Iterable[Key]:
        return self._known

    def _find(self, key: Key) -> KeySpec | None:
        return self._known.get(key)

    def _init(self, specs: Sequence[KeySpec], values: Sequence[Tensor]) -> None:
        self.group.agree("keys, their shapes and dtypes", ", ".join(f"{spec.name!r} {spec}" for spec in specs))
        if self.served is not None:
            self.served.init([spec.name for spec in specs], list(values))
        self._known |= {spec.name: spec for spec in specs}
        self.group.meet()
