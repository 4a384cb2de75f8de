"""The table of `echelon bench schemes`."""

from __future__ import annotations

import json
import math

from echelon.bench.schemes import BASELINE, Outcome, table_facts


def outcome(store: str, seed: int, seconds: float) -> Outcome:
    return Outcome("equal", store, seed, seconds, 100.0, [])


def test_a_speedup_is_the_quotient_of_the_medians_shown() -> None:
    times = {BASELINE: (4.0, 6.0, 9.0), "dist_gsync": (1.0, 3.0, 3.5)}
    rows = table_facts([outcome(store, seed, s) for store, three in times.items() for seed, s in enumerate(three)])
    found = {row["store"]: (row["median_s"], row["speedup_over_bsp"]) for row in rows}
    assert found == {BASELINE: (6.0, 1.0), "dist_gsync": (3.0, 2.0)}


def test_a_target_that_was_never_reached_is_valid_json() -> None:
    rows = table_facts([outcome(BASELINE, 0, math.inf), outcome("dist_gsync", 0, math.inf)])
    assert [(row["median_s"], row["speedup_over_bsp"]) for row in rows] == [(None, None), (None, None)]
    json.dumps(rows, allow_nan=False)
