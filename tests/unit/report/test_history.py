"""The values of a run over time: their size is limited, and no sample is counted twice or lost."""

from __future__ import annotations

import math

import pytest
from made_runs import START, begin, event, report

from echelon.report.charts.history import MAX_REPORTS, MAX_STEPS, MAX_WINDOWS, Bins, History, Span, StepWindows


def history(events: list[dict[str, object]]) -> History:
    made = History()
    for one in events:
        if one["event"] == "begin":
            made.begin(one["rank"], one["at"])  # type: ignore[arg-type]
        else:
            made.report(one)
    return made


def test_a_long_run_keeps_few_reports_and_all_samples() -> None:
    worker = history([begin(0), *(report(0, 0.25 * i, i) for i in range(1, 20_001))]).workers[0]
    spans = worker.spans()
    assert MAX_REPORTS / 3 <= len(spans) <= MAX_REPORTS + 1
    assert sum(span.samples for span in spans) == 32 * 20_000
    assert sum(sum(span.phases) for span in spans) == pytest.approx(0.25 * 20_000)


def test_a_worker_that_joins_again_counts_from_zero_and_leaves_a_gap() -> None:
    events = [begin(0), report(0, 1.0, 10), report(0, 2.0, 20), begin(0, 5.0)]
    worker = history([*events, report(0, 6.0, 4), report(0, 7.0, 8)]).workers[0]
    spans = [(span.begin - START, span.end - START, span.samples) for span in worker.spans()]
    assert spans == [(0.0, 1.0, 320), (1.0, 2.0, 320), (5.0, 6.0, 128), (6.0, 7.0, 128)]
    assert worker.traffic["pushed"] == 28_000  # of both lives


def test_a_program_without_a_beginning_starts_at_its_first_report() -> None:
    worker = history([report(0, 1.0, 10), report(0, 2.0, 20), report(0, 4.0, 5), report(0, 5.0, 10)]).workers[0]
    assert [span.samples for span in worker.spans()] == [320, 160]  # the second life begins with its first report


def test_a_finished_worker_does_nothing_after_its_last_step() -> None:
    worker = history([begin(0), report(0, 1.0, 10), report(0, 9.0, 10, "done")]).workers[0]
    assert [span.end - START for span in worker.spans()] == [1.0]


def test_reports_of_older_versions_have_only_a_wait() -> None:
    old = event("progress", 4.0, rank=0, store=0, clock=8, samples=256, wait_s=1.0, staleness={})
    made = history([begin(0), old])
    assert made.workers[0].spans()[0].phases == (3.0, 0.0, 1.0, 0.0, 0.0)
    assert not made.has_phases


def test_bins_share_a_span_by_time() -> None:
    bins = Bins([Span(0.0, 4.0, 40, (4.0, 0, 0, 0, 0)), Span(6.0, 8.0, 40, (1.0, 0, 1.0, 0, 0))], 0.0, 8.0, 4)
    assert bins.samples == [20, 20, 0, 40]
    assert bins.phases[3] == [1.0, 0, 1.0, 0, 0]
    assert [bins.rate(0), bins.rate(3)] == [10, 20]
    assert math.isnan(bins.rate(2))  # nothing is known about it, which is not a rate of 0


def test_steps_are_kept_in_few_windows_however_long_the_run() -> None:
    windows = StepWindows()
    for index in range(50_000):
        windows.add(index % 2, [[START + 0.1 * index, 0.05, 0.01, 0.03, 0.01]])
    assert len(windows._windows) <= MAX_WINDOWS
    assert all(len(steps) <= MAX_STEPS for window in windows._windows.values() for steps in window.values())
    best = windows.best()
    assert sorted(best) == [0, 1]
    middle = START + 2500
    assert abs(best[0][0].end - middle) < 1000


def test_the_window_with_most_workers_is_shown() -> None:
    windows = StepWindows()
    windows.add(0, [[START + 0.5, 0.1, 0, 0, 0], [START + 5.5, 0.1, 0, 0, 0]])
    windows.add(1, [[START + 5.6, 0.1, 0, 0, 0]])
    assert sorted(windows.best()) == [0, 1]
    assert StepWindows().best() == {}
