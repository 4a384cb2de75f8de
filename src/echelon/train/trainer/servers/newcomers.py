"""What workers exchange besides keys: the mean of buffers, and what a worker that joins a running job needs.

The keys bring a new worker the weights. Frozen parameters and buffers (BatchNorm's statistics) have no keys, so the
first of the others sends a copy of its own after its next step. The others do not wait for that.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import msgspec
import torch
from torch import Tensor

from echelon.kvstore.exchange import pack, unpack
from echelon.kvstore.servers.store import ServerStore
from echelon.train.trainer.base import flatten, unflatten
from echelon.train.trainer.start_equal import as_bytes, check_forms, forms_of, overwrite

log = logging.getLogger(__name__)

BUFFERS = "buffers"  # what the mean is about


def average_over_workers(store: ServerStore, buffers: Sequence[Tensor]) -> None:
    """Set buffers to their mean over the workers. All that train call it."""
    parts = store.gather_bytes(pack(flatten(buffers)), about=BUFFERS)
    rows = torch.stack([unpack(part) for _, part in sorted(parts.items())])
    unflatten(rows.mean(0), buffers)


def give_to_newcomers(store: ServerStore, tensors: Mapping[str, Tensor]) -> None:
    """Send a copy of tensors to workers that have joined, without waiting."""
    head = msgspec.msgpack.encode(forms_of(tensors))
    store.give_values([memoryview(head), *(as_bytes(tensor).numpy().data for tensor in tensors.values())])


def take_as_newcomer(store: ServerStore, tensors: Mapping[str, Tensor]) -> None:
    """Overwrite tensors with those of a worker that trains, when it has sent them."""
    if not tensors:
        return
    frames = store.take_values()
    if frames is None:
        defect = (
            "no other worker was left to send its frozen parameters and buffers, which servers do not store "
            f"({len(tensors)}, for example {next(iter(tensors))!r}); they begin again as the program made them"
        )
        log.warning("worker %d joined a running job, but %s", store.rank, defect)
        store.report_defect(defect)
        return
    check_forms(store.rank, forms_of(tensors), msgspec.msgpack.decode(frames[0], type=dict[str, str]))
    values = (torch.frombuffer(bytearray(frame), dtype=torch.uint8) for frame in frames[1:])
    overwrite(tensors.values(), values)
