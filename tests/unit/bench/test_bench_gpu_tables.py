"""Records as Markdown tables, and tables in a document."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.gpu.results import Origin, Record
from benchmarks.gpu.rows import Bar, Row
from benchmarks.gpu.tables import markdown, rewrite_block
from echelon.errors import DataError

ORIGIN = Origin("0123456789abcdef0123456789abcdef01234567-dirty", "NVIDIA H200", "2.11.0", "the set's own files")
ROWS = [
    Row("fast", "speed", "x.py", "--gpus 0", target=1000, published="520 (K80)"),
    Row("served", "speed", "x.py", "--kv-store dist_sync", launch="-n 1 -s 1", target=0.9, against="fast"),
    Row("learns", "accuracy", "x.py", "", bars=(Bar(1, 0.5, "P100"), Bar(2, 0.48, "8 × K80"))),
]


def speed_record(name: str, *speeds: float) -> Record:
    return Record(
        name,
        "speed",
        "",
        "2026-01-01",
        ORIGIN,
        1,
        9.0,
        speeds=list(speeds),
        engine="engine graph: why",
        precision="precision bfloat16: why",
    )


LEARNS = Record(
    "learns",
    "accuracy",
    "",
    "2026-01-01",
    ORIGIN,
    4,
    9.0,
    validation_accuracy={0: 0.5, 1: 0.45},
    epoch_s={0: 52.0, 1: 1.25},
)


def table(*records: Record) -> str:
    return markdown(ROWS, {record.name: record for record in records})


def test_speeds_are_shown_with_target_and_published_figure() -> None:
    text = table(speed_record("fast", 1000, 1100, 1200))
    assert "| `python x.py --gpus 0` | **1,100** | 1,020 – 1,180 | 3 | 1,000 | yes | 520 (K80) | " in text
    assert "precision bfloat16; engine graph |" in text
    assert "| 1,000 | **no** |" in table(speed_record("fast", 999))


def test_a_target_may_be_a_fraction_of_another_rows_speed() -> None:
    assert "| 90% of fast | yes (95.0%) |" in table(speed_record("fast", 1000), speed_record("served", 950))
    assert "| 90% of fast | **no** (80.0%) |" in table(speed_record("fast", 1000), speed_record("served", 800))
    assert "| 90% of fast | not measured |" in table(speed_record("served", 800))
    failed = replace(speed_record("fast", 1000), error="exit status 1")
    assert "| 90% of fast | not measured |" in table(failed, speed_record("served", 800))


def test_the_last_epoch_is_compared_and_the_best_is_shown() -> None:
    text = table(LEARNS)
    assert "| learns | 1 | 0.5 | P100 | **0.5000** | yes | 0.5000 | 1.2 |" in text
    assert "| learns | 2 | 0.48 | 8 × K80 | **0.4500** | **no** | 0.5000 | 1.2 |" in text
    assert "1 of 2 published accuracies are reached." in text


def test_origins_failures_and_missing_rows_are_listed() -> None:
    extra = replace(ORIGIN, extra="--wd 0.0005")
    text = table(speed_record("fast", 1), replace(LEARNS, error="exit status 1; out of memory", origin=extra))
    assert "- 1 row: NVIDIA H200, torch 2.11.0, commit 0123456789ab-dirty; data: the set's own files\n" in text
    assert "added to every command: `--wd 0.0005`" in text
    assert "- learns failed: exit status 1; out of memory" in text
    assert "- not run: served" in text
    assert "published accuracies" not in text


def test_a_block_is_rewritten_and_the_rest_is_unchanged() -> None:
    text = "before\n<!-- gpu:begin -->\nold\n<!-- gpu:end -->\nafter\n"
    once = rewrite_block(text, "new")
    assert once == "before\n<!-- gpu:begin -->\nnew\n<!-- gpu:end -->\nafter\n"
    assert rewrite_block(once, "new") == once


@pytest.mark.parametrize(
    "text",
    ["", "<!-- gpu:begin -->", "<!-- gpu:end --><!-- gpu:begin -->", 2 * "<!-- gpu:begin --><!-- gpu:end -->"],
)
def test_a_document_without_its_marks_is_rejected(text: str) -> None:
    with pytest.raises(DataError, match="gpu:begin"):
        rewrite_block(text, "new")
