"""The four schemes as settings of three dials.

groups     whose gradients are summed before one update: everybody's (BSP), nobody's (ASP, SSP), the listed ones' (GSP)
bound      how many clocks a group may be ahead of the slowest living group before it must wait; None: no bound
weighting  whether an update is divided by its staleness gamma (GSP)

BSP = one group. ASP = singletons, no bound. SSP(s) = singletons, bound s. GSP = listed groups, weighted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from echelon.errors import UsageError

SCHEMES = {"dist_sync": "BSP", "dist_async": "ASP", "dist_ssync": "SSP", "dist_gsync": "GSP"}

EVERYBODY = 0


@dataclass(frozen=True, slots=True)
class Rules:
    """One setting of the dials. `groups` None means: each worker by itself."""

    name: str
    groups: tuple[tuple[int, ...], ...] | None
    bound: int | None = None
    weighted: bool = False
    _group_of: dict[int, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.bound is not None and self.bound < 0:
            raise UsageError(f"staleness must be 0 or more, not {self.bound}")
        table = {worker: index for index, group in enumerate(self.groups or ()) for worker in group}
        object.__setattr__(self, "_group_of", table)

    def group_of(self, worker: int) -> int:
        """The group a worker belongs to; one that is listed nowhere (it came later) is a group by itself."""
        if self.name == "BSP":
            return EVERYBODY
        return self._group_of.get(worker, len(self.groups or ()) + worker)


def bsp() -> Rules:
    """Lock-step: apply when every living worker's push of this clock is in."""
    return Rules("BSP", groups=None)


def asp() -> Rules:
    """Free: apply each push at once, never hold."""
    return Rules("ASP", groups=None)


def ssp(staleness: int) -> Rules:
    """Bounded: a worker at clock c goes on iff c - min(living clocks) <= staleness."""
    return Rules("SSP", groups=None, bound=staleness)


def gsp(groups: Sequence[Iterable[int]], staleness: int | None = None) -> Rules:
    """Groups in step inside and free between, each update divided by its staleness."""
    return Rules("GSP", groups=tuple(tuple(sorted(group)) for group in groups), bound=staleness, weighted=True)


def rules_for(store: str, staleness: int | None, groups: Sequence[Iterable[int]] | None) -> Rules:
    """The rules behind a store's name. SSP needs a bound and GSP needs groups; the others refuse what they ignore."""
    if store not in SCHEMES:
        raise UsageError(f"no scheme is behind store {store!r}; there is one behind {', '.join(SCHEMES)}")
    scheme = SCHEMES[store]
    if scheme == "SSP":
        if staleness is None:
            raise UsageError("dist_ssync needs a bound: give staleness=N (--staleness N), for example 3")
        _refuse(store, "groups", groups)
        return ssp(staleness)
    if scheme == "GSP":
        if not groups:
            raise UsageError("dist_gsync needs groups: give groups=[[0, 1], [2, 3]] or a groups file (--groups FILE)")
        return gsp(groups, staleness)
    _refuse(store, "staleness", staleness)
    _refuse(store, "groups", groups)
    return bsp() if scheme == "BSP" else asp()


def _refuse(store: str, dial: str, value: object) -> None:
    if value is not None:
        raise UsageError(f"{store} has no {dial}, but {dial}={value!r} was given; use dist_ssync or dist_gsync for it")
