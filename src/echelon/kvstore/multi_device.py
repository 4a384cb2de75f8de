"""The store of a worker with several devices: one process per device, which together are one worker to the servers.

Only device 0 is connected to the scheduler and the servers. Collectives sum what the devices push, and device 0 sends
the sum as one push; weights that come back are broadcast to all devices. All devices of a worker make the same calls in
the same order. At the end of a step and in `barrier`, device 0 shares its view of the job (its rank, the living
workers, whether to stop). Device 0 itself uses only what it has shared: if the devices of a worker decided differently,
they would wait for each other forever.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from echelon.cluster.messages import OptimizerSpec
from echelon.cluster.placement import KeySpec
from echelon.kvstore.collective.process_group import ProcessGroup
from echelon.kvstore.servers.store import ServerStore
from echelon.kvstore.store import KVStore
from echelon.kvstore.values import Keys, Values
from echelon.observe.events import EventLog
from echelon.server.storage.memory import TORCH_DTYPES

HALT = "halt"  # the key in the group's store that holds the reason to stop


class MultiDeviceStore(KVStore):
    """Created by `echelon.kvstore.create`. `server_store` is device 0's connection to the servers, None on others."""

    def __init__(
        self,
        name: str,
        group: ProcessGroup,
        server_store: ServerStore | None,
        *,
        check_finite: bool = False,
        job_has_events: bool = False,
    ) -> None:
        # Device 0 writes the events of the worker.
        events = EventLog(None, "worker", 0) if server_store is None else server_store.events
        super().__init__(name, events, check_finite=check_finite)
        self.job_has_events = job_has_events
        self.group = group
        self.server_store = server_store
        self._halt_requested = False
        self._job_state = ""  # what device 0 has shared, as JSON, and how often it has changed
        self._job_state_number = 0
        self._worker = 0
        self._workers: list[int] = []
        self.share_job_state()

    # --- ranks and workers

    @property
    def rank(self) -> int:
        """This process's rank among all devices of all workers."""
        return self._worker * self.group.size + self.group.rank

    @property
    def worker_rank(self) -> int:
        """The rank of the worker that this device belongs to."""
        return self._worker

    @property
    def workers(self) -> list[int]:
        """The ranks of all devices of the living workers, in order."""
        devices = range(self.group.size)
        return [worker * self.group.size + device for worker in self._workers for device in devices]

    @property
    def survives_deaths(self) -> bool:
        return True

    @property
    def number(self) -> int:
        return 0 if self.server_store is None else self.server_store.number

    @property
    def halt_flag(self) -> float:
        """1.0 if this device asks to stop, else 0.0. The sum over the worker's devices goes to `forward_halt`."""
        return float(self._halt_requested)

    def forward_halt(self, total: float) -> None:
        """Take the sum of the devices' `halt_flag`. If it is not 0, device 0 asks all workers to stop, once."""
        if total and self.server_store is not None and not self._halt_requested:
            self.halt(self.group.get_text(HALT))

    def report_defect(self, reason: str) -> None:
        """Tell the scheduler why the result is not whole, if this is device 0."""
        if self.server_store is not None:
            self.server_store.report_defect(reason)

    def share_job_state(self) -> None:
        """Send device 0's view of the job to all devices. All devices call this."""
        if self.server_store is not None:
            state = json.dumps([self.server_store.rank, self.server_store.workers, self.server_store.halted])
            if state != self._job_state:
                self._job_state_number += 1
                self.group.set_text(f"job state/{self._job_state_number}", state)
                self._job_state = state
        number = torch.tensor([self._job_state_number], device=self.group.device)
        self.group.broadcast([number])
        if int(number) != self._job_state_number:
            self._job_state_number = int(number)
            self._job_state = self.group.get_text(f"job state/{self._job_state_number}")
        self._worker, self._workers, self._halted = json.loads(self._job_state)

    # --- the calls

    def push(self, key: Keys, value: Values, priority: int = 0) -> None:
        """Sum the values over the worker's devices and send the sum to the servers."""
        sums = {name: self._sum_over_devices(tensor) for name, tensor in self._checked(key, value).items()}
        if self.server_store is not None:
            self.server_store.push(list(sums), list(sums.values()))

    def pull(self, key: Keys, out: Values, priority: int = 0) -> None:
        """Wait until the scheme answers, then copy the weights into `out` (into every tensor of a list)."""
        outs = self._targets(key, out)
        # Of the key's dtype on all devices, whatever the dtypes of their outs.
        firsts = [tensors[0].detach().to(TORCH_DTYPES[self._spec_of(name).dtype]) for name, tensors in outs.items()]
        if self.server_store is not None:
            self.server_store.pull(list(outs), firsts)
        self.group.broadcast(firsts)
        for first, tensors in zip(firsts, outs.values(), strict=True):
            for tensor in tensors:
                if tensor.data_ptr() != first.data_ptr():
                    tensor.detach().copy_(first)

    def gather_bytes(self, part: bytes) -> dict[int, bytes | memoryview]:
        """Return the parts of all devices of all workers that take part, by rank."""
        devices = self.group.gather_bytes(part)
        everybody = b""
        if self.server_store is not None:
            own = [bytes(devices[device]) for device in range(self.group.size)]
            parts = self.server_store.gather_bytes(msgspec.msgpack.encode(own))
            everybody = msgspec.msgpack.encode({worker: bytes(packed) for worker, packed in parts.items()})
        shared = msgspec.msgpack.decode(self.group.gather_bytes(everybody)[0], type=dict[int, bytes])
        return {
            worker * self.group.size + device: own
            for worker, packed in shared.items()
            for device, own in enumerate(msgspec.msgpack.decode(packed, type=list[bytes]))
        }

    def _use_optimizer(self, spec: OptimizerSpec) -> None:
        self.group.check_same("the optimizer", str(spec))
        if self.server_store is not None:
            self.server_store.use_optimizer(spec)
        self.optimizer_spec = spec

    def _retire(self) -> None:
        """Stop pushing, when all devices of the worker have retired: `on_retire` takes part until then."""
        if self.server_store is not None:
            self.server_store.retire()

    def _barrier(self) -> None:
        self.forward_halt(self.group.barrier(self.halt_flag))
        if self.server_store is not None:
            self.server_store.barrier()
        self.share_job_state()

    def meet(self) -> list[int]:
        """Wait until all living workers have called this, however long one that lives takes. Return who they were."""
        if self.server_store is not None:
            self.server_store.meet()
        self.share_job_state()
        return self.workers

    def _halt(self, reason: str) -> None:
        """Ask all workers to stop training. Other devices than device 0 ask in the next barrier or step."""
        if self._halt_requested:
            return
        self._halt_requested = True
        if self.server_store is not None:
            self.server_store.halt(reason)
        else:
            self.group.set_text(HALT, reason)

    def save_optimizer_states(self, path: str | Path) -> None:
        """Write the servers' optimizer state to a file. Only device 0 does it; call it on one worker."""
        if self.server_store is not None:
            self.server_store.save_optimizer_states(path)

    def load_optimizer_states(self, path: str | Path) -> None:
        """Restore the servers' optimizer state. Only device 0 does it; call it on one worker, then `barrier`."""
        if self.server_store is not None:
            self.server_store.load_optimizer_states(path)

    def close(self, *, failed: bool = False) -> None:
        """Disconnect from the servers and leave the process group. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        try:
            if self.server_store is not None and not failed:
                self.server_store.close("one of its devices died or failed" if self.group.broken else None)
        finally:
            self.group.close(failed=failed)
            self.on_closed()

    # --- internals

    def _sum_over_devices(self, tensor: Tensor) -> Tensor:
        flat = tensor.to(self.group.device, copy=True).reshape(-1)
        return self.group.all_reduce(flat).result().view(tensor.shape).to(tensor.dtype)

    def _init(self, specs: Sequence[KeySpec], values: Sequence[Tensor]) -> None:
        self.group.check_same("keys, their shapes and dtypes", ", ".join(f"{spec.name!r} {spec}" for spec in specs))
        if self.server_store is not None:
            self.server_store.init([spec.name for spec in specs], list(values))
        self.group.barrier()
