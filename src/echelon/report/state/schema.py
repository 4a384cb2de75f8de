"""The fields of the events that reports read, with their types.

Only Echelon writes events, but another version may write other fields, a disk may fail, and a user may edit the file.
A value of another type would raise an error later, far from its cause; `check_event` rejects the event at once.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from echelon.cluster.messages import Departure

Count = Annotated[int, Meta(ge=0, le=1 << 62)]
Rank = Annotated[int, Meta(ge=0, le=1 << 16)]  # pages have a row for each rank
Seconds = Annotated[float, Meta(ge=0, le=1e10)]
Amount = Annotated[float, Meta(ge=0, le=1e18)]
Value = Annotated[float, Meta(ge=-1e200, le=1e200)] | None  # JSON has null for NaN and infinity


class _Event(Struct):
    at: Annotated[float, Meta(ge=0, le=1e11)]


class _OfRank(_Event):
    rank: Rank


class _Registered(_Event):
    who: str


class _Begin(_OfRank):
    batches_per_epoch: Count = 0
    num_epochs: Count = 0
    first_step: Count = 0
    device: str = ""
    num_devices: Count = 1


class _Progress(_OfRank):
    clock: Count
    samples: Count
    wait_s: Seconds
    staleness: dict[Count, Count]
    rounds_ahead: dict[Count, Count] = {}
    epochs: Amount | None = None
    store: Count = 0
    compute_s: Seconds = 0.0
    push_s: Seconds = 0.0
    pull_s: Seconds = 0.0
    other_s: Seconds = 0.0
    bytes: dict[str, Count] = {}
    steps: list[tuple[Seconds, Seconds, Seconds, Seconds, Seconds]] = []


class _Done(_Progress, kw_only=True):
    seconds: Seconds


class _Training(_OfRank):
    epoch: Amount
    samples: Annotated[int, Meta(ge=1, le=1 << 62)]
    accuracy: Value
    loss: Value


class _Epoch(_OfRank):
    epoch: Count
    samples: Count
    seconds: Seconds | None
    metrics: dict[str, Value]


class _Validation(_Event):
    epoch: Amount
    accuracy: Value = None
    loss: Value = None
    metrics: dict[str, Value] = {}
    seconds: Seconds = 0.0
    done: Count = 0
    total: Count = 0


class _View(_Event):
    workers: list[Rank]
    reason: str
    departure: Departure | None = None


class _Store(_Event):
    store: Count
    name: str
    groups: list[list[Rank]] | None = None
    staleness: Count | None = None


class _StoreOf(_Event):
    worker: Rank
    store: Count
    open: Count


class _Job(_Event):
    num_workers: Rank = 0
    num_servers: Rank = 0
    command: str | None = None
    commit: str | None = None
    machine: dict[str, str | float | None] = {}


class _Settings(_Event):
    devices: list[str] = []
    staleness: Count | None = None


class _Arrival(Struct):
    clock: Count
    own_s: Seconds | None
    late_s: Seconds | None


class _Server(_OfRank):
    store: Count
    pushes: Count
    updates: Count
    held: Count
    sent: Count
    received: Count
    memory_bytes: Amount
    cpu_s: Seconds
    decision: str
    workers: dict[Rank, _Arrival]


class _Gpu(Struct):
    utilisation_percent: Amount


class _Resources(_Event):
    cpu_percent: Amount
    gpus: list[_Gpu]


class _LedgerOpened(_Event):
    store: Count
    ledger: Count
    samples: Count
    epoch: Count = 0
    done: Count = 0


class _EpochTrained(_Event):
    store: Count
    ledger: Count
    partial: Count
    epochs: Count = 0


class _NotWhole(_Event):
    reason: str


class _Warning(_Event):
    text: str


class _Stall(_Event):
    who: str
    waiting: str


_FIELDS: dict[str, type[_Event]] = {
    "loading": _OfRank,
    "registered": _Registered,
    "begin": _Begin,
    "progress": _Progress,
    "done": _Done,
    "training": _Training,
    "epoch": _Epoch,
    "validation": _Validation,
    "final": _Validation,
    "view": _View,
    "store": _Store,
    "store_opened": _StoreOf,
    "store_closed": _StoreOf,
    "job": _Job,
    "settings": _Settings,
    "server": _Server,
    "resources": _Resources,
    "ledger_opened": _LedgerOpened,
    "epoch_trained": _EpochTrained,
    "not_whole": _NotWhole,
    "warning": _Warning,
    "stall": _Stall,
}


def check_event(event: dict[str, Any]) -> None:
    """Raise ValueError or KeyError if a field that reports read is missing or of another type.

    The ValueError is msgspec's, which names the field. Events of other kinds need only a time.
    """
    msgspec.convert(event, _FIELDS.get(str(event["event"]), _Event), str_keys=True)
