"""The cases of `echelon bench schemes`: how the four workers of a job differ from each other. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from echelon.train.recipe.pace import Pace

WORKERS, SERVERS = 4, 2
SLOW_RANK = WORKERS - 1
BASELINE = "dist_sync"
STALENESS = 3
_EVEN = Pace()
_HALVES, _SLOW_APART = "0 1/2 3", "0 1 2/3"


@dataclass(frozen=True, slots=True)
class Case:
    """One case. `groups` are those of dist_gsync; `lr_factor` multiplies --lr; `slow_link`: the slow rank has one."""

    title: str
    pace: Pace = _EVEN
    groups: str = _HALVES
    lr_factor: float = 1.0
    slow_link: bool = False


CASES = {
    "equal": Case("equal workers"),
    "one slow": Case("one worker always 3 × slower", Pace(slow={SLOW_RANK: 3.0}), _SLOW_APART),
    "slow link": Case("one worker behind a slow link", groups=_SLOW_APART, slow_link=True),
    "stalls": Case("each step stalls 5 × with probability 0.1", Pace(stall=(0.1, 5.0))),
    "high rate": Case("equal workers, learning rate 5 × higher", lr_factor=5.0),
}
