"""Who waits for whom. Pure: no torch, no sockets, no threads, no clocks on the wall.

`rules` says what the four schemes are (three dials: groups, bound, weighting); `engine` is the one machine that
runs any setting of the dials. The server and, later, the simulator drive the same engine.
"""

from echelon.schemes.engine import Apply, Contribution, Decision, Engine, Reply
from echelon.schemes.rules import SCHEMES, Rules, asp, bsp, gsp, rules_for, ssp

__all__ = [
    "SCHEMES",
    "Apply",
    "Contribution",
    "Decision",
    "Engine",
    "Reply",
    "Rules",
    "asp",
    "bsp",
    "gsp",
    "rules_for",
    "ssp",
]
