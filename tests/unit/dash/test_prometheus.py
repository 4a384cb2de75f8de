"""/metrics, as Prometheus' own parser reads it."""

from __future__ import annotations

import re
from pathlib import Path

from dash_pages import begin, event, page_of, progress, write
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from echelon import __version__

UNITS = ("_seconds", "_bytes", "_ratio", "_info")


def scraped(folder: Path, after_s: float = 2.0) -> dict[str, list[Sample]]:
    with page_of(folder, after_s=after_s) as page:
        answer = page.get("/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    samples: dict[str, list[Sample]] = {}
    for family in text_string_to_metric_families(answer.text):
        assert family.documentation
        assert family.type in ("gauge", "counter", "histogram"), family.name
        for sample in family.samples:
            samples.setdefault(sample.name, []).append(sample)
    return samples


def run(folder: Path) -> None:
    write(folder, begin(0), begin(1))
    write(folder, progress(0, 1.0, 2), progress(0, 2.0, 20, staleness={"0": 15, "3": 4, "100": 1}))
    write(folder, progress(1, 2.0, 10))
    write(folder, event("validation", 2.0, epoch=1.0, seconds=2.0, accuracy=0.8125, loss=0.5))


def test_values_have_their_labels(tmp_path: Path) -> None:
    run(tmp_path)
    samples = scraped(tmp_path)
    assert samples["echelon_build_info"][0].labels["version"] == __version__
    steps = {sample.labels["worker"]: sample.value for sample in samples["echelon_worker_steps_total"]}
    assert steps == {"0": 20.0, "1": 10.0}
    (accuracy,) = samples["echelon_validation_accuracy_ratio"]
    assert accuracy.value == 0.8125
    (info,) = samples["echelon_run_info"]
    assert info.labels == {"run": tmp_path.name, "status": "training"}
    assert {sample.labels["state"] for sample in samples["echelon_worker_state"]} == {"training"}


def test_staleness_is_a_cumulative_histogram(tmp_path: Path) -> None:
    run(tmp_path)
    samples = scraped(tmp_path)
    buckets = {
        sample.labels["le"]: sample.value
        for sample in samples["echelon_worker_missed_updates_bucket"]
        if sample.labels["worker"] == "0"
    }
    assert buckets == {
        "0": 15, "1": 15, "2": 15, "4": 19, "8": 19, "16": 19, "32": 19, "64": 19, "+Inf": 20
    }  # fmt: skip
    assert samples["echelon_worker_missed_updates_count"][0].value == 20
    assert samples["echelon_worker_missed_updates_sum"][0].value == 112


def test_names_follow_the_conventions(tmp_path: Path) -> None:
    """The prefix of the application, snake case, `_total` at counters only, and no unit but the base ones."""
    run(tmp_path)
    with page_of(tmp_path, after_s=2.0) as page:
        lines = page.get("/metrics").text.splitlines()
    kinds = dict(line.split()[2:4] for line in lines if line.startswith("# TYPE"))
    helps = {line.split()[2] for line in lines if line.startswith("# HELP")}
    assert set(kinds) == helps
    for name, kind in kinds.items():
        assert re.fullmatch(r"echelon_[a-z][a-z_]*[a-z]", name), name
        assert name.endswith("_total") == (kind == "counter"), name
        assert not re.search(r"_(ms|milliseconds|minutes|percent|kb|mb|count|sum|bucket)(_|$)", name), name


def test_labels_are_escaped(tmp_path: Path) -> None:
    folder = tmp_path / 'quo"te\\back\nline'
    folder.mkdir()
    run(folder)
    (info,) = scraped(folder)["echelon_run_info"]
    assert info.labels["run"] == folder.name


def test_a_run_without_events_has_metrics(tmp_path: Path) -> None:
    assert scraped(tmp_path)["echelon_run_info"][0].labels["status"] == "waiting"
