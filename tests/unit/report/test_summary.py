"""The summary of a run from its events, and run directories."""

from __future__ import annotations

import json
import os
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.errors import UsageError
from echelon.report.runs import discard_run, latest_run, new_run
from echelon.report.state.run import Event, RunState
from echelon.report.state.worker import mean_and_max, sum_histograms
from echelon.report.summary import summary, write_summary


def event(kind: str, at: float, **fields: Any) -> Event:
    return {"event": kind, "at": at, "who": "test", **fields}


def report(kind: str, at: float, rank: int, clock: int, **fields: Any) -> Event:
    phases = {"compute_s": 3.0, "push_s": 0.5, "wait_s": 0.25, "pull_s": 0.125}
    usual = {"samples": 32 * clock, "bytes": {"pushed": 8}, "staleness": {"0": clock}, **phases} | fields
    return event(kind, at, rank=rank, clock=clock, **usual, **({"seconds": at - 1000} if kind == "done" else {}))


def validation(at: float, accuracy: float) -> Event:
    return event("validation", at, seconds=at - 1000, epoch=1.0, accuracy=accuracy, loss=0.5)


RUN = [
    event("begin", 1000.0, rank=0),
    event("begin", 1001.0, rank=1),
    report("progress", 1002.0, 0, 2),
    report("progress", 1003.0, 1, 1),
    validation(1003.5, 0.90),
    validation(1003.6, 0.93),
    report("done", 1004.0, 0, 4, staleness={"0": 3, "2": 1}),
    report("done", 1006.0, 1, 3, staleness={"1": 3}),
]


def taken(events: list[Event]) -> RunState:
    state = RunState()
    state.take(events)
    return state


def test_the_summary_of_a_run() -> None:
    result = summary(taken(RUN), "dist_gsync", {"lr": 0.1}, 0)
    assert result["store"] == "dist_gsync"
    assert result["settings"] == {"lr": 0.1}
    assert result["exit_status"] == 0
    assert result["seconds"] == 6.0  # from the first start to the last end
    assert result["samples"] == 32 * 7
    assert result["samples_per_s"] == round(32 * 7 / 6, 3)
    assert result["accuracy"] == 0.93
    assert [line["accuracy"] for line in result["validations"]] == [0.90, 0.93]
    assert result["workers"] == [
        {
            "rank": 0,
            "clock": 4,
            "samples": 128,
            "deaths": 0,
            "restarts": 0,
            "compute_s": 3.0,
            "push_s": 0.5,
            "wait_s": 0.25,
            "pull_s": 0.125,
            "bytes": {"pushed": 8},
            "staleness": {"0": 3, "2": 1},
            "rounds_ahead": {},
            "phase": "finished",
            "finished": True,
            "seconds": 4.0,
        },
        {
            "rank": 1,
            "clock": 3,
            "samples": 96,
            "deaths": 0,
            "restarts": 0,
            "compute_s": 3.0,
            "push_s": 0.5,
            "wait_s": 0.25,
            "pull_s": 0.125,
            "bytes": {"pushed": 8},
            "staleness": {"1": 3},
            "rounds_ahead": {},
            "phase": "finished",
            "finished": True,
            "seconds": 6.0,
        },
    ]


def test_the_final_accuracy_replaces_that_of_validations() -> None:
    names = ("accuracy", "accuracy_at_epoch", "accuracy_is_final", "metrics")
    stopped = summary(taken(RUN), "dist_sync", {}, 130)
    assert tuple(stopped[name] for name in names) == (0.93, 1.0, False, {})
    final = event("final", 1007.0, epoch=2, accuracy=0.97, metrics={"f1": 0.9})
    ended = summary(taken([*RUN, final]), "dist_sync", {}, 0)
    assert tuple(ended[name] for name in names) == (0.97, 2, True, {"f1": 0.9})


def test_the_summary_of_a_killed_run_counts_the_time_to_the_last_report() -> None:
    result = summary(taken(RUN[:4]), "dist_sync", {}, 137)
    assert (result["seconds"], result["samples_per_s"]) == (3.0, 32.0)


def test_without_validation_there_is_no_accuracy() -> None:
    assert summary(taken(RUN[:2]), "dist_sync", {}, 0)["accuracy"] is None


def test_an_empty_run_has_a_summary() -> None:
    result = summary(RunState(), "dist_sync", {}, 1)
    assert (result["seconds"], result["samples_per_s"], result["samples"], result["workers"]) == (0.0, 0.0, 0, [])


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, len(RUN)), max_size=4))
def test_the_state_does_not_depend_on_how_events_are_grouped(cuts: list[int]) -> None:
    state = RunState()
    borders = [0, *sorted(cuts), len(RUN)]
    for start, stop in pairwise(borders):
        state.take(RUN[start:stop])
    assert summary(state, "s", {}, 0) == summary(taken(RUN), "s", {}, 0)


def test_workers_are_in_rank_order() -> None:
    state = taken([event("begin", 5.0, rank=2), event("begin", 4.0, rank=0), event("begin", 6.0, rank=1)])
    assert [worker["rank"] for worker in summary(state, "s", {}, 0)["workers"]] == [0, 1, 2]
    assert state.began == 4.0


def test_a_worker_that_died_keeps_its_last_report() -> None:
    died = "worker 1 (pid 7 on host) died: its connection closed"
    state = taken([*RUN[:-1], event("view", 1003.2, number=2, workers=[0], reason=died, departure="died")])
    result = summary(state, "dist_sync", {}, 1)
    assert result["news"] == [died]
    assert [(w["rank"], w["finished"], w["clock"], w["seconds"]) for w in result["workers"]] == [
        (0, True, 4, 4.0),
        (1, False, 1, 3.0),
    ]
    assert result["seconds"] == 4.0


def test_news_contain_deaths_and_stalls_but_no_regular_departures() -> None:
    state = taken(
        [
            event("view", 1.0, number=2, workers=[0], reason="worker 1 left: done", departure="left"),
            event("stall", 2.0, waiting="server 0 holds key 'w' at clock 3 for worker 1") | {"who": "worker 0"},
            event("warning", 3.0, text="the loss grows"),
            event("something new", 3.0),
        ]
    )
    result = summary(state, "s", {}, 0)
    assert result["news"] == ["worker 0 waits: server 0 holds key 'w' at clock 3 for worker 1", "the loss grows"]
    assert result["warnings"] == ["the loss grows"]


def test_a_finished_worker_stays_finished() -> None:
    state = taken([*RUN, report("progress", 1009.0, 0, 1)])
    assert state.workers[0].clock == 4


def test_the_run_ends_with_the_last_worker() -> None:
    """Processes write their events with a delay."""
    assert taken([*RUN[:-2], RUN[-1], RUN[-2]]).seconds == 6.0


def test_rates_follow_the_reports() -> None:
    state = taken([event("begin", 10.0, rank=0), report("progress", 12.0, 0, 2)])
    assert state.workers[0].rate == pytest.approx(32.0)
    state.take([report("progress", 13.0, 0, 4)])
    assert state.workers[0].rate == pytest.approx(0.6 * 32 + 0.4 * 64)
    before = state.workers[0].rate
    state.take([report("progress", 13.01, 0, 5)])  # too soon after the last report
    assert (state.workers[0].rate, state.workers[0].clock) == (before, 5)


def test_histograms_are_added_and_sorted_as_numbers() -> None:
    assert list(sum_histograms([{"10": 1, "9": 2}, {"9": 1}]).items()) == [(9, 3), (10, 1)]
    assert mean_and_max({"0": 3, "2": 1}) == (0.5, 2)
    assert mean_and_max({}) == (0.0, 0)


def test_the_summary_has_both_units_of_staleness_and_the_bound() -> None:
    state = taken([report("done", 1004.0, 0, 4, staleness={"5": 4}, rounds_ahead={"1": 3, "3": 1})])
    result = summary(state, "dist_ssync", {"staleness": 3}, 0)
    assert result["staleness_bound"] == 3
    assert (result["workers"][0]["staleness"], result["workers"][0]["rounds_ahead"]) == ({"5": 4}, {"1": 3, "3": 1})


def test_the_summary_is_written_atomically(tmp_path: Path) -> None:
    result = summary(taken(RUN), "dist_gsync", {"groups": [[0], [1]]}, 0)
    path = write_summary(tmp_path, result)
    assert path == tmp_path / "summary.json"
    assert json.loads(path.read_text()) == result
    write_summary(tmp_path, result | {"exit_status": 1})
    assert json.loads(path.read_text())["exit_status"] == 1
    assert [file.name for file in tmp_path.iterdir()] == ["summary.json"]


# --- run directories


def test_a_new_run_becomes_the_latest(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    one = new_run("one", "dist_sync", root)
    assert one == root / "one"
    assert one.is_dir()
    assert (root / "latest").resolve() == one.resolve()
    two = new_run("two", "dist_sync", root)
    assert (root / "latest").resolve() == two.resolve()
    assert os.readlink(root / "latest") == "two"  # relative: the directory can be moved
    assert sorted(path.name for path in root.iterdir()) == ["latest", "one", "two"]


def test_runs_without_a_name_are_named_by_time_and_store(tmp_path: Path) -> None:
    names = [new_run(None, "dist_ssync", tmp_path).name for _ in range(4)]
    assert len(set(names)) == 4
    for name in names:
        assert re.fullmatch(r"\d{8}-\d{6}-dist_ssync(\.\d+)?", name)


def test_an_existing_name_is_rejected_and_latest_is_unchanged(tmp_path: Path) -> None:
    new_run("one", "s", tmp_path)
    new_run("two", "s", tmp_path)
    with pytest.raises(UsageError, match=r"the run .*one already exists; choose another --name"):
        new_run("one", "s", tmp_path)
    assert os.readlink(tmp_path / "latest") == "two"


@pytest.mark.parametrize("earlier", [["one"], []])
def test_discarding_a_run_restores_latest(tmp_path: Path, earlier: list[str]) -> None:
    root = tmp_path / "runs"
    for name in earlier:
        new_run(name, "s", root)
    before, made = latest_run(root), new_run("none", "s", root)
    (made / "events.jsonl").touch()
    discard_run(made, before)
    assert latest_run(root) == (earlier[0] if earlier else None)
    assert not made.exists()
    assert root.exists() == bool(earlier)


def test_discarding_a_run_keeps_a_later_one(tmp_path: Path) -> None:
    before, made = latest_run(tmp_path), new_run("none", "s", tmp_path)
    new_run("since", "s", tmp_path)
    discard_run(made, before)
    assert latest_run(tmp_path) == "since"


def test_a_run_has_trained_with_its_first_step() -> None:
    state = RunState()
    state.take([event("begin", 1.0, rank=0), report("progress", 1.1, 0, 0)])
    assert not state.has_trained
    state.take([report("progress", 1.2, 0, 1)])
    assert state.has_trained


@pytest.mark.parametrize("name", ["", "latest", "a/b", "../a", "a b", "a\n", "/a", ".."])
def test_an_invalid_name_is_rejected(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        new_run(name, "s", tmp_path / "runs")
    assert not (tmp_path / "runs" / "latest").is_symlink()
