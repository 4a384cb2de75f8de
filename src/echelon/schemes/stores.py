"""The table of store names: which scheme each store follows, and what it needs.

Every question about a store's name is answered here, so that no other module compares or parses names:

    kind = store_kind("dist_gsync")   # in any case; an unknown name raises UsageError with the nearest name
    kind.scheme                       # "GSP"
    kind.is_collective(num_servers)   # whether it runs on torch.distributed instead of servers
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from echelon.errors import UsageError, unknown_name


class Use(enum.Enum):
    """Whether a store uses something: servers, a staleness bound, groups."""

    NEVER = "never"
    OPTIONAL = "optional"
    REQUIRED = "required"


@dataclass(frozen=True, slots=True)
class StoreKind:
    """What a store's name means.

    `lock_step`: each step waits for all workers. `spans_workers`: not only the devices of one worker. `sharded`: each
    device updates its own part of every value.
    """

    name: str
    scheme: str
    lock_step: bool = False
    spans_workers: bool = True
    sharded: bool = False
    servers: Use = Use.REQUIRED
    staleness: Use = Use.NEVER
    groups: Use = Use.NEVER

    @property
    def collective(self) -> bool:
        """Whether the store never has servers and always runs on torch.distributed."""
        return self.servers is Use.NEVER

    @property
    def needs_servers(self) -> bool:
        """Whether the store cannot run in a job without servers."""
        return self.servers is Use.REQUIRED

    def is_collective(self, num_servers: int) -> bool:
        """Return whether the store runs without servers in a job of `num_servers`. dist_sync does if there are none."""
        return self.collective or (self.servers is Use.OPTIONAL and num_servers == 0)

    @property
    def takes_staleness(self) -> bool:
        """Whether a staleness bound may be given."""
        return self.staleness is not Use.NEVER

    @property
    def takes_groups(self) -> bool:
        """Whether groups of workers may be given."""
        return self.groups is not Use.NEVER


_ALL = (
    # between the devices of one worker
    StoreKind("local", "BSP", lock_step=True, spans_workers=False, servers=Use.NEVER),
    StoreKind("device", "BSP", lock_step=True, spans_workers=False, servers=Use.NEVER),
    StoreKind("nccl_allreduce", "BSP", lock_step=True, spans_workers=False, servers=Use.NEVER),
    StoreKind("nccl", "BSP", lock_step=True, spans_workers=False, sharded=True, servers=Use.NEVER),
    # between workers, through servers
    StoreKind("dist_sync", "BSP", lock_step=True, servers=Use.OPTIONAL),
    StoreKind("dist_async", "ASP"),
    StoreKind("dist_ssync", "SSP", staleness=Use.REQUIRED),
    StoreKind("dist_gsync", "GSP", staleness=Use.OPTIONAL, groups=Use.REQUIRED),
    # between the devices of all workers
    StoreKind("dist_device_sync", "BSP", lock_step=True, servers=Use.NEVER),
    StoreKind("dist_sync_device", "BSP", lock_step=True, servers=Use.NEVER),
)

STORES: dict[str, StoreKind] = {kind.name: kind for kind in _ALL}
SYNONYMS = {  # MXNet's other names, and the store of each
    "local_update_cpu": "local",
    "local_allreduce_cpu": "local",
    "local_allreduce_device": "device",
    "dist": "dist_sync",
    "dist_async_device": "dist_async",  # the devices of a worker always sum their gradients where they are
    "dist_device_async": "dist_async",
}
SCHEMES = {kind.name: kind.scheme for kind in _ALL if not kind.collective}  # of the stores that can have servers


def stores_with(setting: str) -> list[str]:
    """Return the names of the stores that accept a setting, which is "staleness" or "groups"."""
    return [kind.name for kind in _ALL if getattr(kind, setting) is not Use.NEVER]


def store_kind(name: str) -> StoreKind:
    """Return the kind of a store, whose name may be in any case. A wrong name is an error, never a silent local run."""
    if not isinstance(name, str):
        raise UsageError(f"the name of a store must be a string, not {name!r}")
    known = SYNONYMS.get(name.lower(), name.lower())
    if known not in STORES:
        raise unknown_name("store", name, STORES, synonyms=SYNONYMS)
    return STORES[known]
