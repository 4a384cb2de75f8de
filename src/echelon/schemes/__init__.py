"""When a worker must wait for others. Pure code: no torch, sockets, threads or wall-clock time.

Read in this order:

`rules`   defines the four schemes BSP, ASP, SSP and GSP as settings of three dials: groups, bound and weighting.
`engine`  decides for every push and pull what to hold, apply and answer. One engine runs any setting of the dials.
`stores`  is the table of store names (`dist_sync`, …): the scheme of each, and whether it uses servers.
"""

from echelon.schemes.engine import Apply, Contribution, Decision, Engine, Reply
from echelon.schemes.rules import Rules, asp, bsp, gsp, rules_for, ssp
from echelon.schemes.stores import SCHEMES, STORES, StoreKind, store_kind

__all__ = [
    "SCHEMES",
    "STORES",
    "Apply",
    "Contribution",
    "Decision",
    "Engine",
    "Reply",
    "Rules",
    "StoreKind",
    "asp",
    "bsp",
    "gsp",
    "rules_for",
    "ssp",
    "store_kind",
]
