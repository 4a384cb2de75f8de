"""The published comparison: its rows, and the text and picture that it makes of result files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from benchmarks.compare import __main__ as compare
from benchmarks.compare.one_rate_table import one_rate_table
from benchmarks.compare.picture import Bar, bars_of, comparison_figure
from benchmarks.compare.results import Result, read_result, read_results, short_commit, shown_command
from benchmarks.compare.rows import BLOCKS, ROWS, Row, Target, choose, why_not
from benchmarks.compare.run import Outcome, time_left_s
from benchmarks.compare.schemes_table import schemes_table, verdict
from benchmarks.compare.tables import TABLES, make_block
from echelon.errors import DataError, UsageError

Seconds: TypeAlias = float | None
ROOT = Path(__file__).parents[3]
MACHINE = {"cpu": "A CPU", "cores": 2, "memory_gib": 23.5, "kernel": "Linux 6", "python": "3.11", "torch": "2.13"}
ROW = Row("pushpull-x", "pushpull", "`dist_sync`", "echelon bench pushpull", "", 60, (Target("mxnet", 10),))
TIMES = {
    "settings": {"model": "mlp"},
    "cases": [
        {"name": "echelon", "median_ms": 10.0, "p10_ms": 9.0, "p90_ms": 12.0},
        {"name": "mxnet", "median_ms": 95.0, "p10_ms": 90.0, "p90_ms": 120.0},
        {"name": "echelon_copy", "median_ms": 20.0, "p10_ms": 19.0, "p90_ms": 21.0},
    ],
    "ratios": {"echelon_vs_mxnet": 9.5, "echelon_vs_echelon_copy": 2.0},
    "ratio_spread": {
        "echelon_vs_mxnet": {"low": 8.25, "high": 11.0},
        "echelon_vs_echelon_copy": {"low": 1.9, "high": 2.1},
    },
}


def result(row: Row, body: dict[str, Any]) -> Result:
    return Result(row, row.command, "0123456789abcdef-dirty", "2026-11-16T12:00:00+00:00", MACHINE, body)


def facts(store: str, low: Seconds, median: Seconds, high: Seconds, case: str = "equal") -> dict[str, Any]:
    spread = {"min_s": low, "median_s": median, "max_s": high, "samples_per_s": 900.0, "reached": 5, "runs": 5}
    return {"case": case, "store": store, "speedup_over_bsp": None if median is None else 1.0, **spread}


def test_a_block_has_the_figures_and_where_they_come_from() -> None:
    text = make_block([ROW], [result(ROW, TIMES)])
    assert "| `dist_sync` | echelon | 10.0 ms | 9.0 – 12.0 ms |  |  |  |" in text
    assert "|  | mxnet | 95.0 ms | 90.0 – 120.0 ms | **9.50 ×** | 8.25 – 11.00 | 10 ×: **no** |" in text
    assert "- `echelon bench pushpull`: `pushpull-x.json`, commit 012345678-dirty, 2026-11-16" in text
    assert "- machine: A CPU, 2 cores, 23.5 GiB, Linux 6, Python 3.11, torch 2.13" in text


def test_a_row_that_failed_or_did_not_run_is_named_with_its_cause() -> None:
    failed = Outcome(ROW, 3.0, error="FAILED (status 1)\nlast lines of pushpull-x:\n  no memory")
    with_old = make_block([ROW], [result(ROW, TIMES)], [failed])
    assert (
        "**pushpull-x: FAILED (status 1) last lines of pushpull-x:   no memory**; the figures above are of" in with_old
    )
    skipped = make_block([ROW], [], [Outcome(ROW, skipped="a namespace needs root")])
    assert skipped == "- **pushpull-x: not run, because a namespace needs root**; there are no figures"
    assert make_block([ROW], []) == "- pushpull-x: not measured yet: `echelon bench pushpull`"


def test_rates_are_shown_with_the_slow_end_first() -> None:
    row = Row("train-x", "train", "ResNet-20", "echelon bench train", "", 60)
    settings = {"batch_size": 128, "num_workers": 2}
    text = make_block([row], [result(row, {**TIMES, "settings": settings})])
    assert "| echelon | 25,600 samples/s | 21,333 – 28,444 samples/s |" in text


@pytest.mark.parametrize(
    ("lock_step", "other", "says"),
    [
        ((1.0, 1.5, 2.0), (3.0, 6.0, 9.0), "**lock-step wins**; `dist_async` takes 4.0 times as long"),
        ((1.0, 1.5, 2.0), (None, None, None), "**lock-step wins**; `dist_async` never reaches the target in most runs"),
        ((4.0, 5.0, 6.0), (1.0, 2.0, 3.0), "**lock-step loses**; `dist_async` needs 40 % of its time"),
        ((1.0, 2.0, 3.0), (2.5, 2.6, 2.7), "no clear winner, because the ranges of"),
        ((None, None, None), (1.0, 2.0, 3.0), "**lock-step loses**; `dist_async` needs 2.00 s, and `dist_sync` never"),
    ],
)
def test_the_ranges_over_the_seeds_decide_whether_lock_step_wins(
    lock_step: tuple[Seconds, Seconds, Seconds], other: tuple[Seconds, Seconds, Seconds], says: str
) -> None:
    assert verdict([facts("dist_sync", *lock_step), facts("dist_async", *other)]).startswith(says)


def test_the_schemes_have_a_verdict_per_case_and_the_cases_that_did_not_run() -> None:
    table = [
        facts("dist_sync", 2.8, 2.9, 3.2),
        facts("dist_async", 1.9, 2.0, 2.5),
        facts("dist_sync", 1.5, 1.6, 1.8, "high rate"),
        facts("dist_async", None, None, None, "high rate"),
        facts("dist_sync", 6.0, 6.5, 7.0, "one slow"),
        facts("dist_gsync", 2.0, 3.0, 3.5, "one slow") | {"speedup_over_bsp": 2.17},
    ]
    text = schemes_table([result(ROW, {"table": table, "not_run": {"slow link": "a network namespace needs root"}})])
    assert "| equal workers | `dist_sync` | 2.90 | 2.80 – 3.20 | 5 of 5 | 900 | 1.00 |  |" in text
    assert "|  | `dist_async` | **2.00** | 1.90 – 2.50 |" in text
    assert "|  | `dist_async` | never | never – never |" in text
    assert "| 900 | 2.17 | 1.8 ×: yes |" in text
    assert "better of the two learning rates: `dist_sync` 1.60 s, `dist_async` 2.00 s." in text
    assert "- **one worker behind a slow link: not run, because a network namespace needs root**." in text


def test_accuracies_of_several_files_are_one_table() -> None:
    def cells(accuracy: float | None) -> dict[str, Any]:
        return {"cells": [{"command": "digits", "scheme": "dist_async", "workers": 8, "accuracy": accuracy}]}

    plain, low = (Row(name, "one-rate", title, "", "", 1) for name, title in (("a", ""), ("b", "`--lr 0.025`")))
    lines = one_rate_table([result(low, cells(0.96394)), result(plain, cells(None))]).splitlines()
    assert lines[2] == "| digits | 8 | – | failed | – | – |"
    assert lines[3] == "| digits, `--lr 0.025` | 8 | – | 0.9639 | – | – |"


def test_the_picture_compares_with_other_systems_only() -> None:
    assert bars_of([result(ROW, TIMES)]) == [Bar("push-pull dist_sync", "mxnet", 9.5, 8.25, 11.0)]
    drawn = comparison_figure([Bar("a", "mxnet", 9.5, 8.0, 11.0), Bar("a", "ddp", 0.9, 0.7, 1.2)])
    assert [text.get_text() for text in drawn.axes[0].texts] == ["9.50 × MXNet", "0.90 × DDP"]
    assert [label.get_text() for label in drawn.axes[0].get_yticklabels()] == ["a", ""]


def test_the_commands_of_all_rows_are_valid_and_the_document_has_all_blocks() -> None:
    from echelon.cli.main import make_parser

    for row in ROWS:
        for words in (row.words(quick=False), row.words(quick=True)):
            bench = words[words.index("echelon") + 1 :] if "echelon" in words else []
            if bench:
                make_parser(bench).parse_args(bench)
    assert set(BLOCKS) == set(TABLES)
    document = (ROOT / "docs" / "results.md").read_text()
    assert [block for block in BLOCKS if f"<!-- bench:{block}:begin -->" not in document] == []
    assert len({row.name for row in ROWS}) == len(ROWS)


def test_the_document_in_the_repository_is_made_from_the_result_files_beside_it() -> None:
    document = (ROOT / "docs" / "results.md").read_text()
    for block in BLOCKS:
        rows = [row for row in ROWS if row.block == block]
        found = TABLES[block](read_results(rows, ROOT / "benchmarks" / "results"))
        assert found in document, f"block {block}: run `python -m benchmarks.compare --tables`"


def test_rows_are_chosen_by_name_or_block() -> None:
    assert [row.name for row in choose(["costs", "pushpull"])][-1] == "costs"
    assert all(row.standard for row in choose([]))
    assert {row.block for row in choose(["hosts"])} == {"hosts"}
    with pytest.raises(UsageError, match="schemes"):
        choose(["shemes"])


def test_a_row_that_lacks_its_file_says_so(tmp_path: Path) -> None:
    (photographs,) = choose(["io-photos"])
    assert why_not(photographs, tmp_path) == "data/io/photos.rec does not exist"
    assert why_not(ROW, tmp_path) == ""


def test_the_time_left_follows_the_rows_that_are_done() -> None:
    assert time_left_s([], [ROW, ROW]) == 120
    assert time_left_s([Outcome(ROW, seconds=30), Outcome(ROW, skipped="no root")], [ROW]) == 30


def test_commands_are_shown_without_their_files() -> None:
    shown = shown_command("echelon bench schemes --json benchmarks/results/schemes.json --seeds 5 --plot a.png")
    assert shown == "echelon bench schemes --seeds 5"
    assert short_commit("0123456789abcdef") == "012345678"


def test_a_file_that_is_not_a_result_is_an_error_with_its_name(tmp_path: Path) -> None:
    (tmp_path / ROW.file).write_text('{"command": 1}')
    with pytest.raises(DataError, match=r"pushpull-x\.json is not a result of `echelon bench pushpull`"):
        read_result(ROW, tmp_path)


def test_missing_rows_are_those_without_a_result_of_this_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare, "commit", lambda: "new")
    rows = choose(["pushpull"])
    for row, commit in zip(rows, ("old", "new"), strict=False):
        body = {"command": "echelon", "commit": commit, "date": "2026", "machine": MACHINE}
        (tmp_path / row.file).write_text(json.dumps(body))
    assert [row.name for row in compare.missing(rows, tmp_path)] == [rows[0].name, rows[2].name]
