"""The four schemes as settings of three dials.

groups     whose gradients are summed before one update: EVERYBODY's, each worker's ALONE, or those of listed groups
bound      how many clocks a group may be ahead of the slowest active group before it must wait; None: no bound
divisor    what the step of an update is divided by: nothing, its staleness (GSP), or the number of such updates that
           make up a round of all workers (ASP, SSP)

BSP = EVERYBODY. ASP = ALONE without a bound. SSP(s) = ALONE with bound s. GSP = listed groups, divided by staleness.

The divisors let one learning rate serve all schemes. BSP applies the mean of a round's gradients in one step. ASP and
SSP apply W steps for the same samples, so each is divided by W, and a sample moves the weights by the same amount.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from echelon.errors import UsageError, unknown_name
from echelon.schemes.stores import SCHEMES, Use, store_kind, stores_with


class Sharing(enum.Enum):
    """The settings of `groups` that list no workers."""

    EVERYBODY = "everybody"
    ALONE = "alone"


EVERYBODY, ALONE = Sharing.EVERYBODY, Sharing.ALONE


class Divisor(enum.Enum):
    """What divides the step of an update."""

    ONE = "one"
    STALENESS = "staleness"  # gamma, the number of updates since the group's last one
    ROUND = "round"  # the samples of a round of all workers, divided by the samples of this update


LR_SCALES = ("share", "mxnet")  # "share": a push steps by its share of a round; "mxnet": by the full learning rate


@dataclass(frozen=True, slots=True)
class Rules:
    """One setting of the dials, under the name of a scheme."""

    name: str
    groups: Sharing | tuple[tuple[int, ...], ...]
    bound: int | None = None
    divisor: Divisor = Divisor.ONE
    _listed: dict[int, int] = field(init=False, repr=False, compare=False)  # worker -> index of its group
    _num_listed: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.bound is not None and self.bound < 0:
            raise UsageError(f"staleness must be 0 or more, not {self.bound}")
        groups = () if isinstance(self.groups, Sharing) else self.groups
        listed = {worker: index for index, group in enumerate(groups) for worker in group}
        object.__setattr__(self, "_listed", listed)
        object.__setattr__(self, "_num_listed", len(groups))

    @property
    def sums_over_everybody(self) -> bool:
        """Whether an update is the sum over all workers, so that it means something without an optimizer."""
        return self.groups is EVERYBODY

    def group_of(self, worker: int) -> int:
        """Return the group of a worker. A worker that joined later and is not listed is a group by itself."""
        if self.groups is EVERYBODY:
            return 0
        return self._listed.get(worker, self._num_listed + worker)


def bsp() -> Rules:
    """Lock-step: apply an update when every active worker has pushed its clock."""
    return Rules("BSP", EVERYBODY)


def asp(divisor: Divisor = Divisor.ROUND) -> Rules:
    """Asynchronous: apply each push immediately and never wait."""
    return Rules("ASP", ALONE, divisor=divisor)


def ssp(staleness: int, divisor: Divisor = Divisor.ROUND) -> Rules:
    """Bounded staleness: a worker at clock c continues if c - min(active clocks) <= staleness."""
    return Rules("SSP", ALONE, bound=staleness, divisor=divisor)


def gsp(groups: Sequence[Iterable[int]], staleness: int | None = None) -> Rules:
    """Lock-step inside each group, asynchronous between groups; each update is divided by its staleness."""
    return Rules("GSP", tuple(tuple(sorted(group)) for group in groups), bound=staleness, divisor=Divisor.STALENESS)


def check_lr_scale(lr_scale: str) -> None:
    """Raise UsageError for an unknown value."""
    if lr_scale not in LR_SCALES:
        raise unknown_name("lr_scale", lr_scale, LR_SCALES)


def has_settings(store: str, staleness: int | None, groups: Sequence[Iterable[int]] | None) -> bool:
    """Return whether a store has the settings that it needs. A worker that joins a running job may lack them."""
    kind = store_kind(store)
    lacks_bound = kind.staleness is Use.REQUIRED and staleness is None
    return not (lacks_bound or (kind.groups is Use.REQUIRED and not groups))


def rules_for(
    store: str, staleness: int | None, groups: Sequence[Iterable[int]] | None, lr_scale: str = "share"
) -> Rules:
    """Return the rules of a store with servers. Missing settings, and settings without effect, raise UsageError.

    `lr_scale` is one of LR_SCALES. It has an effect in ASP and SSP; every store accepts it, so that changing the store
    needs no other change.
    """
    kind = store_kind(store)
    check_lr_scale(lr_scale)
    if kind.collective:
        raise UsageError(f"store {store!r} does not use servers; the stores that do are {', '.join(SCHEMES)}")
    if kind.staleness is Use.REQUIRED and staleness is None:
        raise UsageError(f"{store} needs a bound: give staleness=N (--staleness N), for example 3")
    if kind.groups is Use.REQUIRED and not groups:
        raise UsageError(
            f"{store} needs groups: give groups=[[0, 1], [2, 3]] (--groups 0,1/2,3) or a groups file (--groups FILE)"
        )
    for dial, value in (("staleness", staleness), ("groups", groups)):
        if value is not None and kind.name not in (stores := stores_with(dial)):
            instead = " or ".join(stores)
            raise UsageError(f"{store} has no {dial}, but {dial}={value!r} was given; use {instead} for it")
    # After these checks, the settings that were given determine the scheme.
    if groups is not None:
        return gsp(groups, staleness)
    divisor = Divisor.ROUND if lr_scale == "share" else Divisor.ONE
    if staleness is not None:
        return ssp(staleness, divisor)
    return bsp() if kind.lock_step else asp(divisor)
