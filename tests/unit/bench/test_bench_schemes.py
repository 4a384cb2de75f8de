"""The cases, the checks and the table of `echelon bench schemes`."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import pytest

from echelon.bench.commands import add_benchmarks
from echelon.bench.harness.results import write_result
from echelon.bench.schemes import run as schemes
from echelon.bench.schemes.cases import BASELINE, CASES, SERVERS, SLOW_RANK, WORKERS
from echelon.bench.schemes.link import SlowLink
from echelon.bench.schemes.measure import Outcome, behind, options_of
from echelon.bench.schemes.table import table_facts
from echelon.environment import Job
from echelon.errors import UsageError
from echelon.launch.local.launcher import LocalLauncher
from echelon.launch.plan import Request


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_benchmarks(parser.add_subparsers())
    return parser.parse_args(["schemes", *arguments])


def outcome(store: str, seed: int, seconds: float, case: str = "equal") -> Outcome:
    return Outcome(case, store, seed, seconds, 100.0, [(0.0, 0.1), (1.0, 0.9)])


def test_a_speedup_is_the_quotient_of_the_medians_shown() -> None:
    times = {BASELINE: (4.0, 6.0, 9.0), "dist_gsync": (1.0, 3.0, 3.5)}
    rows = table_facts([outcome(store, seed, s) for store, three in times.items() for seed, s in enumerate(three)])
    found = {row["store"]: (row["median_s"], row["speedup_over_bsp"]) for row in rows}
    assert found == {BASELINE: (6.0, 1.0), "dist_gsync": (3.0, 2.0)}


def test_a_target_that_was_never_reached_is_valid_json(tmp_path: Path) -> None:
    rows = table_facts([outcome(BASELINE, 0, 2.0), outcome("dist_gsync", 0, math.inf)])
    assert [(row["median_s"], row["speedup_over_bsp"], row["reached"]) for row in rows] == [
        (2.0, 1.0, 1),
        (None, None, 0),
    ]
    write_result(tmp_path / "result.json", {"table": rows, "seconds": [math.inf, {"nested": (math.nan, 1.5)}]})
    text = (tmp_path / "result.json").read_text()
    body = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert body["seconds"] == [None, {"nested": [None, 1.5]}]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seeds", "0"], "--seeds is 0; it must be 1 or more"),
        (["--limit-epochs", "0"], "--limit-epochs is 0"),
        (["--batch-size", "-1"], "--batch-size is -1"),
        (["--target", "95"], "--target is 95; it is an accuracy"),
        (["--pace", "nan"], "--pace must be 0 or more and --lr above 0; got nan and 0.02"),
    ],
)
def test_settings_that_measure_nothing_are_rejected(arguments: list[str], message: str) -> None:
    args = parse(*arguments)
    with pytest.raises(UsageError, match=message):
        args.run(args)


def test_every_case_runs_by_default_and_a_case_without_root_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schemes, "why_impossible", lambda: "a network namespace needs root")
    cases, not_run = schemes.possible_cases(list(CASES))
    assert cases == ["equal", "one slow", "stalls", "high rate"]
    assert not_run == {"slow link": "a network namespace needs root"}
    assert schemes.possible_cases(["equal"]) == (["equal"], {})
    monkeypatch.setattr(schemes, "why_impossible", str)
    assert schemes.possible_cases(["slow link", "equal"]) == (["equal", "slow link"], {})


def test_a_command_whose_only_case_cannot_run_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schemes, "why_impossible", lambda: "a network namespace needs root")
    args = parse("--case", "slow link")
    with pytest.raises(UsageError, match="case 'slow link' cannot run, because a network namespace needs root"):
        args.run(args)


def test_a_case_changes_only_what_it_names() -> None:
    args = parse("--lr", "0.02")
    equal = options_of(args, CASES["equal"], "dist_gsync", 3)
    assert (equal.lr, equal.groups, equal.pace.slow, equal.pace.stall, equal.seed) == (0.02, "0 1/2 3", {}, None, 3)
    assert options_of(args, CASES["high rate"], "dist_sync", 3).lr == pytest.approx(0.1)
    assert options_of(args, CASES["one slow"], "dist_sync", 0).pace.slow == {SLOW_RANK: 3.0}
    assert options_of(args, CASES["one slow"], "dist_sync", 0).groups is None


def test_only_the_slow_worker_is_behind_the_link_and_its_tensors_use_it() -> None:
    launcher = LocalLauncher("198.18.0.1")
    plan = launcher.plan(Request(Job(num_workers=WORKERS, num_servers=SERVERS), ["python", "train.py"]))
    moved = {process.name: process for process in behind(SlowLink("198.18.0.1", 7), plan).processes}
    slow = moved.pop(f"worker {SLOW_RANK}")
    assert slow.arguments == ["nsenter", "--target=7", "--net", "--", "python", "train.py"]
    assert slow.job.transport == "tcp"
    assert {process.job.transport for process in moved.values()} == {"auto"}
    assert [process for process in plan.processes if process.name in moved] == list(moved.values())


def test_the_picture_has_a_panel_for_each_measured_case(tmp_path: Path) -> None:
    schemes.draw([outcome(BASELINE, 0, 1.0), outcome("dist_async", 0, math.inf, "stalls")], 0.95, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
