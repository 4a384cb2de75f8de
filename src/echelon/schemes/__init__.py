"""When a worker must wait for others. Pure code: no torch, sockets, threads or wall-clock time.

Read in this order:

`rules`   defines the four schemes BSP, ASP, SSP and GSP as settings of three dials: groups, bound and divisor.
`engine`  decides for every push and pull what to hold, apply and answer. One engine runs any setting of the dials.
`norms`   decides when the norm of a round is known, for clipping by the global norm.
`stores`  is the table of store names (`dist_sync`, …): the scheme of each, and whether it uses servers.
"""

from echelon.schemes.engine import Action, Apply, Contribution, Decision, Engine, Gathered, Reply
from echelon.schemes.norms import NormRequest, Norms, scale_to_clip
from echelon.schemes.rules import LR_SCALES, Divisor, Rules, asp, bsp, check_lr_scale, gsp, has_settings, rules_for, ssp
from echelon.schemes.stores import SCHEMES, STORES, StoreKind, store_kind

__all__ = [
    "LR_SCALES",
    "SCHEMES",
    "STORES",
    "Action",
    "Apply",
    "Contribution",
    "Decision",
    "Divisor",
    "Engine",
    "Gathered",
    "NormRequest",
    "Norms",
    "Reply",
    "Rules",
    "StoreKind",
    "asp",
    "bsp",
    "check_lr_scale",
    "gsp",
    "has_settings",
    "rules_for",
    "scale_to_clip",
    "ssp",
    "store_kind",
]
