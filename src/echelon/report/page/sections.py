"""The sections of the page, in order: what a reader asks first comes first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

from echelon.report.charts.chart import Chart
from echelon.report.charts.learning import learning_charts
from echelon.report.charts.recorded import FAILED, RecordedRun
from echelon.report.charts.scales import byte_count, duration, number
from echelon.report.charts.staleness import staleness_charts, staleness_overlay
from echelon.report.charts.steps import step_chart
from echelon.report.charts.work import fleet_rates, parts_of, phase_chart, phase_totals, rate_chart, timeline
from echelon.report.page.drawing import figure
from echelon.report.page.facts import chosen, configuration, differences, results
from echelon.report.page.frame import css_colour
from echelon.report.page.html import Child, Html, element, join
from echelon.report.page.tables import table, without_unknown
from echelon.report.state.worker import mean_and_max

MOST_FAULTS = 100
MOST_ROWS_BESIDE = 12  # a chart with more rows is too tall to stand beside another one
MOST_FINDINGS = 8  # of a kind
LONG = 32  # letters of a value that gets a line of its own
TRAFFIC = {
    "pushed": "gradients pushed",
    "pulled": "weights pulled",
    "sent": "sent over sockets",
    "received": "received over sockets",
}


def section(heading: str, *content: Child, level: int = 2) -> Html:
    """Return a section with a heading; nothing without content."""
    inside = join(*content)
    return element("section", element(f"h{level}", heading), inside) if inside else Html("")


def charts(found: Iterable[Chart | None], kind: str = "pairs-of-charts") -> Html:
    """Return charts in two columns, or each as wide as the page (`wide`)."""
    drawn = [figure(chart) for chart in found if chart is not None]
    return element("div", *drawn, class_=kind) if drawn else Html("")


# --- one run


def header(run: RecordedRun, level: int = 1) -> Html:
    """Return the title of a run and its figures."""
    found = results(run)
    tiles = (
        element("div", element("dt", name), element("dd", value))
        for name, value in found.items()
        if name != "status" and value not in ("–", "0")
    )
    return join(
        element(f"h{level}", title(run)),
        element("p", _status(found["status"]), " ", _about(run), class_="about"),
        element("dl", *tiles, class_="tiles"),
    )


def title(run: RecordedRun) -> str:
    """Return what a run trained and how."""
    settings = run.settings
    if not settings:
        return f"{run.name}{f' · {run.store}' if run.store else ''}"
    data = "synthetic data" if settings.get("benchmark") else settings.get("data")
    bound = "" if run.bound is None else f", staleness {run.bound}"
    return f"{settings.get('network')} on {data} · {run.store}{bound}"


def _status(status: str) -> Html:
    kind = "good" if status == "finished" else ("busy" if status == "running" else "bad")
    return element("span", status, class_=f"status {kind}")


def _about(run: RecordedRun) -> str:
    began = datetime.fromtimestamp(run.start, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    count = len(run.state.workers)
    name = f"run {run.name} · " if run.settings else ""
    return f"{name}{count} worker{'s' if count != 1 else ''} · began {began}"


def run_sections(run: RecordedRun, colour: str, level: int = 2, learning: Html | None = None) -> Html:
    """Return everything about one run. `learning` are its curves, unless they are in charts with those of others."""
    phases = phase_chart(run)
    is_tall = phases is not None and len(phases.rows) > MOST_ROWS_BESIDE
    beside = charts([rate_chart(run), None if is_tall else phases])
    work = join(beside, charts([phases if is_tall else None, timeline(run), step_chart(run)], "wide"))
    parts = {
        "Findings": _findings(run),
        "Learning": learning,
        "Work": work,
        "Staleness": charts(staleness_charts(run, colour)) or _not_stale(run),
        "Bytes": _traffic(run),
        "Faults and rejoins": _faults(run),
        "Workers": _workers(run),
        "Servers": _servers(run),
        "Configuration": _configuration(run),
    }
    return join(*(section(heading, content, level=level) for heading, content in parts.items()))


def _findings(run: RecordedRun) -> Html:
    """Return who was slow and why, who failed, and the warnings, as sentences."""
    sentences = run.verdicts.sentences()
    if not sentences and run.verdicts.seconds:
        sentences = ["No worker was slow for a quarter of the time or more."]
    failures = [fault for fault in run.state.faults if fault.kind in FAILED]
    for fault in failures[:MOST_FINDINGS]:
        sentences.append(f"After {duration(max(0.0, fault.at - run.start))}: {fault.text}.")
    if len(failures) > MOST_FINDINGS:
        sentences.append(f"{len(failures) - MOST_FINDINGS} more processes failed.")
    sentences += [f"Warning: {words}" for words in run.state.warnings[:MOST_FINDINGS]]
    if len(run.state.warnings) > MOST_FINDINGS:
        sentences.append(f"{len(run.state.warnings) - MOST_FINDINGS} more warnings.")
    return element("ul", *(element("li", words) for words in sentences), class_="findings") if sentences else Html("")


def _not_stale(run: RecordedRun) -> Html:
    if not any(worker.staleness for worker in run.state.ranked):
        return Html("")
    return element("p", "No step missed an update: every worker read the newest weights.")


def _traffic(run: RecordedRun) -> Html:
    workers = {rank: one.traffic for rank, one in sorted(run.history.workers.items()) if one.traffic}
    if not workers:
        return Html("")
    seconds = run.seconds or 1.0
    rows: list[list[Child]] = []
    for name, words in TRAFFIC.items():
        values = [one.get(name, 0) for one in workers.values()]
        total = sum(values)
        rows.append([words, byte_count(total), f"{byte_count(total / seconds)}/s", byte_count(max(values))])
    raw, wire = (
        sum(one.get(name, 0) for one in workers.values() for name in pair)
        for pair in (("pushed", "pulled"), ("sent", "received"))
    )
    return join(
        table(["bytes of all workers", "total", "per second", "largest of one worker"], rows),
        element("p", _wire_sentence(raw, wire), class_="note"),
    )


def _wire_sentence(raw: int, wire: int) -> str:
    if not raw:
        return "No tensor was pushed or pulled."
    if wire < 0.05 * raw:
        return "Tensors moved through shared memory; only small messages went over sockets."
    return f"{wire / raw:.2f} bytes went over sockets for each byte of a tensor that was pushed or pulled."


def _faults(run: RecordedRun) -> Html:
    faults = run.state.faults
    rows: list[list[Child]] = [
        [duration(max(0.0, fault.at - run.start)), fault.who, fault.kind, fault.text] for fault in faults[:MOST_FAULTS]
    ]
    more = len(faults) - len(rows)
    return join(
        table(["after", "process", "what", "reason"], rows)
        if rows
        else element("p", "None: no process failed or left early, and no stall was reported."),
        element("p", f"{more} more are in {run.folder / 'events.jsonl'}.", class_="note") if more else None,
    )


def _workers(run: RecordedRun) -> Html:
    totals = phase_totals(run)
    parts = [part.label for part in parts_of(run)]
    used = [i for i in range(len(parts)) if any(one[i] for one in totals.values())]
    headings = ["worker", "state", "epochs", "steps", "samples", "samples/s", *(parts[i] for i in used)]
    headings += ["updates missed", "rounds ahead"]
    rows: list[list[Child]] = []
    for worker in run.state.ranked:
        spent = totals.get(worker.rank, (0.0,) * len(parts))
        whole = sum(spent)
        rows.append(
            [
                str(worker.rank),
                worker.phase,
                number(worker.epochs_done, 3) if worker.batches_per_epoch else "–",
                number(worker.clock, 9),
                number(worker.samples, 9),
                number(worker.samples / whole if whole else None),
                *(f"{spent[i] / whole:.0%}" if whole else "–" for i in used),
                _mean_max(worker.staleness),
                _mean_max(worker.rounds_ahead),
            ]
        )
    note = element("p", "Staleness is the mean, and in brackets the maximum, over the steps.", class_="note")
    return join(table(*without_unknown(headings, rows)), note) if rows else Html("")


def _servers(run: RecordedRun) -> Html:
    headings = ["server", "pushes", "updates", "memory", "CPU time", "sent", "received", "a recent decision"]
    rows: list[list[Child]] = [
        [
            str(server.rank),
            number(server.pushes, 12),
            number(server.updates, 12),
            byte_count(server.memory_bytes),
            duration(server.cpu_s),
            byte_count(server.sent),
            byte_count(server.received),
            server.decision,
        ]
        for _, server in sorted(run.state.servers.items())
    ]
    return table(headings, rows) if rows else Html("")


def _mean_max(histogram: dict[str, int]) -> str:
    mean, largest = mean_and_max(histogram)
    return f"{mean:.1f} ({largest})" if histogram else "–"


def _configuration(run: RecordedRun) -> Html:
    everything, changed = configuration(run), chosen(run)
    log = f"{number(run.num_events, 9)} events in {run.folder / 'events.jsonl'}"
    if run.unreadable:
        log += f"; {number(run.unreadable, 9)} lines could not be read"
    blocks = [_pairs(run.environment | {"log": log})]
    if everything:
        blocks.append(element("p", element("strong", "Settings other than the defaults")))
        blocks.append(_pairs(changed) if changed else element("p", "None."))
        rest = element("details", element("summary", "All settings"), _pairs(everything))
        blocks.append(rest)
    return join(*blocks)


def _pairs(values: dict[str, str]) -> Html:
    items = (
        element("div", element("dt", name), element("dd", value), class_="long" if len(value) > LONG else None)
        for name, value in values.items()
    )
    return element("dl", *items, class_="pairs")


# --- several runs


def comparison(runs: Sequence[RecordedRun], colours: Sequence[str]) -> Html:
    """Return the results of several runs side by side, what differs in their configuration, and charts of all."""
    headings: list[Child] = ["", *map(_named, range(len(runs)), runs, colours)]
    columns = [results(run) for run in runs]
    rows: list[list[Child]] = [
        [name, *(column[name] for column in columns)]
        for name in columns[0]
        if any(column[name] not in ("–", "0") for column in columns)
    ]
    differing: list[list[Child]] = [[name, *values] for name, values in differences(runs)]
    same = element("p", "The runs have the same configuration.")
    return join(
        section("Results", table(headings, rows)),
        section("Differences in configuration", table(headings, differing) if differing else same),
        section("Learning", charts(learning_charts(runs, colours))),
        section("Work", charts([fleet_rates(runs, colours), staleness_overlay(runs, colours)])),
    )


def _named(index: int, run: RecordedRun, colour: str) -> Html:
    """Return the name of a run in its colour, with a link to its part of the page."""
    key = element("span", class_="key area", style=f"--k:{css_colour(colour)}")
    return join(key, element("a", run.name, href=f"#run-{index}"))
