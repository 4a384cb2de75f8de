"""Whatever values the fields of events have, there is a page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from made_runs import START, event, whole_run, write_run

from echelon.report.charts.recorded import read_run
from echelon.report.page.page import page
from echelon.report.state.schema import check_event

SERVER: dict[str, Any] = {
    "rank": 0,
    "store": 0,
    "pushes": 1,
    "updates": 1,
    "held": 0,
    "sent": 1,
    "received": 1,
    "memory_bytes": 1,
}
SERVER |= {"cpu_s": 0.1, "decision": "held", "workers": {"0": {"clock": 1, "own_s": 0.1, "late_s": None}}}
OTHERS = [
    event("loading", 0.0, rank=0),
    event("registered", 0.0, "worker 0 (pid 3)"),
    event("view", 3.0, number=2, workers=[0], reason="died", departure="died"),
    event("store_opened", 0.1, worker=0, store=0, open=1),
    event("store_closed", 19.0, worker=1, store=0, open=0),
    event("epoch", 4.0, rank=0, epoch=1, samples=10, seconds=2.0, metrics={"accuracy": 0.5}),
    event("server", 4.0, "server 0", **SERVER),
    event("resources", 5.0, cpu_percent=120.0, gpus=[{"utilisation_percent": 3.0}]),
    event("warning", 5.0, text="careful"),
    event("stall", 6.0, seconds=3.0, waiting="for worker 1"),
    event("of a later version", 7.0, anything=[1]),
]
RUN = [*whole_run(2, 6), *OTHERS]

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**64), 2**64)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def changed_runs(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Return the events of a run in which up to four fields have any value, or are missing."""
    events = [dict(one) for one in RUN]
    for _ in range(draw(st.integers(1, 4))):
        one = draw(st.sampled_from(events))
        name = draw(st.sampled_from(sorted(one)))
        if draw(st.booleans()):
            one[name] = draw(JSON)
        else:
            del one[name]
        if not one:
            one["event"] = "nothing"
    return events


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changed_runs())
def test_any_value_in_any_field_gives_a_page(tmp_path: Path, events: list[dict[str, Any]]) -> None:
    text = page([read_run(write_run(tmp_path / "run", events))])
    assert text.endswith("</html>\n")
    assert len(text) < 200_000


def test_all_events_that_echelon_writes_are_accepted(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", RUN))
    assert (run.num_events, run.unreadable) == (len(RUN), 0)


@pytest.mark.parametrize(
    "changed",
    [
        {"clock": "3"},
        {"staleness": {"x": 1}},
        {"bytes": {"sent": -1}},
        {"steps": [[1, 2]]},
        {"rank": 1.5},
        {"at": START * 1e9},
    ],
    ids=str,
)
def test_a_report_with_a_wrong_value_is_rejected(changed: dict[str, Any]) -> None:
    good = next(one for one in RUN if one["event"] == "progress")
    check_event(good)
    with pytest.raises(ValueError, match=r"Expected|must be|contain"):
        check_event(good | changed)
