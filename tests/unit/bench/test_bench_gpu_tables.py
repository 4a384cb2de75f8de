"""Records as Markdown tables, and tables in a document."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.document import rewrite_block
from benchmarks.gpu.results import Origin, Record
from benchmarks.gpu.rows import Bar, Row, cluster_rows, scheme_rows
from benchmarks.gpu.tables import markdown
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
    once = rewrite_block(text, "gpu", "new")
    assert once == "before\n<!-- gpu:begin -->\nnew\n<!-- gpu:end -->\nafter\n"
    assert rewrite_block(once, "gpu", "new") == once


@pytest.mark.parametrize(
    "text",
    ["", "<!-- gpu:begin -->", "<!-- gpu:end --><!-- gpu:begin -->", 2 * "<!-- gpu:begin --><!-- gpu:end -->"],
)
def test_a_document_without_its_marks_is_rejected(text: str) -> None:
    with pytest.raises(DataError, match="gpu:begin"):
        rewrite_block(text, "gpu", "new")


def cluster_record(name: str, valid: float) -> Record:
    epochs = range(40)
    return Record(
        name,
        "cluster",
        "",
        "2026-01-01",
        ORIGIN,
        2,
        9.0,
        train_accuracy=dict.fromkeys(epochs, 0.97),
        validation_accuracy=dict.fromkeys(epochs, valid),
        epoch_s=dict.fromkeys(epochs, 1.25),
    )


def test_the_tables_of_the_cluster_have_their_published_format() -> None:
    names = ["cluster-dist_sync-512-0.1", "cluster-dist_async-512-0.1"]
    text = markdown(cluster_rows(), {name: cluster_record(name, 0.84) for name in names})
    assert "| GTX980 | 5 | 10 | 256 | `dist_sync` | 7 | 1 |\n" in text
    assert "| NVIDIA H200 | 5 workers | 10 processes, 1 GPU | 256 | `dist_sync` | 1.2 | 2 |\n" in text
    lock_step, relaxed = text.split("#### Async (`dist_async`)")
    assert "- `batch_size = 512`, `learning_rate = .1`\n\n| epoch | train accuracy | valid accuracy |" in lock_step
    assert "| 20 | 0.970000 | **0.840000** | 0.901002 | 0.831250 | yes |\n" in lock_step
    assert "| 30 | 0.970000 | **0.840000** | 0.938349 | 0.860444 | **no** |\n" in lock_step
    assert "| published valid for BSP | reaches BSP's |" in relaxed
    assert "2 of 4 published accuracies of the cluster are reached." in text


def test_the_seconds_to_an_accuracy_are_compared_with_lock_step() -> None:
    def run(name: str, *curve: tuple[float, float]) -> Record:
        return Record(name, "schemes", "", "2026-01-01", ORIGIN, 4, 9.0, curve=list(curve))

    records = [
        run("slow-dist_sync-0", (50.0, 0.8), (90.0, 0.86), (95.0, 0.87)),
        run("slow-dist_sync-1", (110.0, 0.85)),
        run("slow-dist_async-0", (40.0, 0.85)),
    ]
    text = markdown(scheme_rows(), {record.name: record for record in records})
    assert "### CIFAR-10 to a validation accuracy of 0.85\n" in text
    assert "| `dist_sync` | BSP | **100.0** | 90.0, 110.0 | 1.00 |\n" in text
    assert "| `dist_async` | Async | **40.0** | 40.0 | 2.50 |\n" in text
