"""The page of runs: its structure, that text stays text, and that its size is limited."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from made_runs import START, begin, event, report, training, validation, whole_run, write_run

from echelon.cli.main import main
from echelon.report.charts.recorded import read_runs
from echelon.report.page.html import VOID
from echelon.report.page.page import page

EVIL = "<script>alert(1)</script>\"'&\x00"


class Structure(HTMLParser):
    """What a page consists of. It fails if elements are not closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.count: dict[str, int] = {}
        self.attributes: list[tuple[str, str, str | None]] = []
        self.text: dict[str, list[str]] = {}
        self.feed(text)
        self.close()
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        self._add(tag, attrs)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in VOID
        self._add(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open:
            self.text.setdefault(self.open[-1], []).append(data)

    def _add(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.count[tag] = self.count.get(tag, 0) + 1
        self.attributes += [(tag, name, value) for name, value in attrs]

    def headings(self) -> list[str]:
        return self.text["h2"]


def made_page(*folders: Path) -> str:
    return page(read_runs(list(map(str, folders))))


def titles(text: str) -> list[str]:
    """Return the titles of the charts."""
    return re.findall(r"<figcaption><strong>(.*?)</strong>", text)


@pytest.fixture
def one(tmp_path: Path) -> str:
    return made_page(write_run(tmp_path / "one", whole_run()))


def test_a_page_has_one_title_and_every_chart_has_a_text_and_a_table(one: str) -> None:
    found = Structure(one)
    assert one.startswith("<!doctype html>")
    assert one.count("<title>digits-cnn on digits") == 1
    assert found.count["h1"] == found.count["main"] == 1
    labels = [value for tag, name, value in found.attributes if (tag, name) == ("svg", "aria-label")]
    assert len(labels) == found.count["svg"] == found.count["figure"] == 10
    assert all(labels)
    assert one.count("<summary>Values</summary>") == 10
    assert "validation: from 0.6 to 0.95" in labels[0]  # type: ignore[operator]


def test_a_page_needs_nothing_but_itself(one: str) -> None:
    found = Structure(one)
    for _, name, value in found.attributes:
        assert name not in ("src", "srcset", "onload", "onclick", "xlink:href")
        assert name != "href" or (value or "").startswith("#")
    assert not {"script", "link", "img", "iframe", "object"} & set(found.count)
    assert "url(" not in one
    assert "@import" not in one
    assert "http" not in one


def test_a_page_answers_in_this_order(one: str) -> None:
    assert Structure(one).headings() == [
        "Findings",
        "Learning",
        "Work",
        "Staleness",
        "Bytes",
        "Faults and rejoins",
        "Workers",
        "Configuration",
    ]
    assert titles(one)[:6] == [
        "Accuracy by epoch",
        "Accuracy by time",
        "Loss by epoch",
        "Loss by time",
        "Samples per second of each worker",
        "Where the time of each worker went",
    ]
    for words in ("echelon train -n 2", "0123456789ab-dirty", "a CPU, 2 cores", "bound 3", "80 kB", "staleness 3"):
        assert words in one


def test_no_text_of_a_run_becomes_markup(tmp_path: Path) -> None:
    job = {"num_workers": 1, "num_servers": 1, "command": EVIL, "commit": EVIL, "machine": {"cpu": EVIL}}
    events = [event("job", -1, **job), event("settings", 0, network=EVIL, data=EVIL, **{EVIL: {EVIL: [EVIL]}})]
    events += [event("store", 0, store=0, name=EVIL, staleness=None), begin(0), report(0, 1.0, 5), begin(1)]
    events += [event("warning", 1.0, text=EVIL), event("stall", 2.0, EVIL, seconds=1.0, waiting=EVIL)]
    events += [event("view", 3.0, number=2, workers=[0], reason=EVIL, departure="died"), validation(1.0, 1.0)]
    text = made_page(write_run(tmp_path / "<b>run & 'co'", events), write_run(tmp_path / "other", whole_run()))
    assert "<script" not in text
    assert "<b>" not in text
    assert "\x00" not in text
    assert text.count("&lt;script&gt;alert(1)&lt;/script&gt;") > 8
    Structure(text)


def test_values_that_are_not_finite_leave_gaps(tmp_path: Path) -> None:
    events = [begin(0), *(training(0, i, i, None if i == 5 else 0.5) for i in range(10))]
    events += [validation(float(i), float(i), accuracy=None if i == 4 else 0.5, loss=None) for i in range(10)]
    text = made_page(write_run(tmp_path / "nan", [*events, report(0, 10.0, 40)]))
    lines = re.findall(r'd="([^"]*)" class="line( faint)?"', text)
    assert [d.count("M") for d, _ in lines[:2]] == [1, 2]  # accuracy: training whole, validation with one gap
    assert "Loss by epoch" in titles(text)
    assert not re.search(r'(d|style|points)="[^"]*(nan|inf)', text.lower())


def test_runs_are_drawn_into_the_same_charts_and_compared(tmp_path: Path) -> None:
    other = [one | {"lr": 0.1, "kv_store": "dist_async"} if one["event"] == "settings" else one for one in whole_run(3)]
    text = made_page(write_run(tmp_path / "first", whole_run()), write_run(tmp_path / "second", other))
    found = Structure(text)
    assert found.count["h1"] == 1
    assert found.count["article"] == 2
    assert found.headings()[:4] == ["Results", "Differences in configuration", "Learning", "Work"]
    differences = text.partition("Differences in configuration")[2].partition("</table>")[0]
    rows = re.findall(r'<th scope="row">(.*?)</th><td[^>]*>(.*?)</td><td[^>]*>(.*?)</td>', differences)
    assert rows == [("kv_store", "dist_ssync", "dist_async"), ("lr", "0.05", "0.1")]
    first_chart = text.partition("Accuracy by epoch")[2].partition("</figure>")[0]
    assert len(re.findall(r'class="line"', first_chart)) == 2


@pytest.mark.parametrize(
    ("events", "charts"),
    [
        pytest.param([event("registered", 0.0, "server 0 (pid 3)")], [], id="nothing but a registration"),
        pytest.param([begin(0)], [], id="no step yet"),
        pytest.param([begin(0), report(0, 0.0, 0, staleness={})], [], id="a report without time"),
        pytest.param([validation(3.0, 1.0)], ["Accuracy by epoch"], id="only a validation"),
        pytest.param(
            [begin(0), report(0, 2.0, 9, steps=[], staleness={}, rounds_ahead={}, bytes={})],
            ["Samples per second of each worker", "Where the time of each worker went"],
            id="one worker without servers",
        ),
        pytest.param([report(0, 1.0, 3), report(0, 2.0, 6)], ["Updates missed", "Rounds ahead"], id="a user's program"),
        pytest.param([begin(0), report(0, 1e-9, 1), report(0, 1e9, 2)], ["Updates missed"], id="thirty years"),
        pytest.param([begin(0), report(0, 5.0, 3, staleness={"1000000": 3})], ["Updates missed"], id="very stale"),
    ],
)
def test_a_run_that_has_little_has_a_page_of_little(tmp_path: Path, events: list[Any], charts: list[str]) -> None:
    text = made_page(write_run(tmp_path / "run", events))
    Structure(text)
    assert set(charts) <= set(titles(text))
    assert len(text) < 60_000
    if not charts:
        assert titles(text) == []


def test_failures_and_rejoins_are_listed_with_their_times_and_reasons(tmp_path: Path) -> None:
    died = event("view", 3.0, "scheduler 0", number=2, workers=[0], reason="worker 1 died: no pulse", departure="died")
    events = [begin(0), begin(1), report(0, 2.0, 4), report(1, 2.0, 4), died, begin(1, 6.0), report(1, 9.0, 3)]
    text = made_page(write_run(tmp_path / "run", [*events, report(0, 9.0, 30)]))
    table = text.partition("Faults and rejoins")[2].partition("</table>")[0]
    assert re.findall(
        r'<th class="n" scope="row">(.*?)</th><td>(.*?)</td><td>(.*?)</td><td[^>]*>(.*?)</td>', table
    ) == [
        ("3 s", "worker 1", "died", "worker 1 died: no pulse"),
        ("6 s", "worker 1", "joined again", ""),
    ]
    assert "After 3 s: worker 1 died: no pulse." in text
    assert text.count('class="moment"') == 4  # two in each of the charts over time


def test_servers_and_the_use_of_the_machine_are_shown(tmp_path: Path) -> None:
    counts = {"pushes": 657, "updates": 600, "held": 0, "sent": 26_800, "received": 58_000, "memory_bytes": 184_000_000}
    server = event("server", 5.0, "server 0", rank=0, store=0, cpu_s=0.561, decision="held: <b>", workers={}, **counts)
    busy = event("resources", 6.0, "launcher 0", cpu_percent=150.0, gpus=[])
    events = [event("job", -1.0, machine={"cores": 2}), begin(0), report(0, 4.0, 9, rounds_ahead={}), server, busy]
    text = made_page(write_run(tmp_path / "run", events))
    row = text.partition("<h2>Servers</h2>")[2].partition("<tbody>")[2].partition("</tbody>")[0]
    cells = re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row)
    assert cells == ["0", "657", "600", "184 MB", "561 ms", "26.8 kB", "58 kB", "held: &lt;b&gt;"]
    assert "<dt>devices busy</dt><dd>75%</dd>" in text
    assert '<th class="n" scope="col">rounds ahead</th>' not in text  # no worker knows it


@pytest.mark.parametrize(("num_workers", "num_reports"), [(1, 2000), (64, 130)])
def test_the_size_of_a_page_is_limited(tmp_path: Path, num_workers: int, num_reports: int) -> None:
    events = whole_run(num_workers, num_reports)
    events += [validation(20.0 * i / 10_000, i / 10.0, accuracy=math.sin(i) ** 2) for i in range(10_000)]
    text = made_page(write_run(tmp_path / "run", events))
    assert len(text) < 600_000
    assert "worker 0" in text


def test_many_workers_have_a_band_and_lines_for_the_slowest(tmp_path: Path) -> None:
    events = [begin(rank) for rank in range(30)]
    for second in range(1, 30):
        events += [report(rank, float(second), second * (2 if rank == 7 else 10)) for rank in range(30)]
    text = made_page(write_run(tmp_path / "run", events)).partition("Samples per second")[2].partition("</figure>")[0]
    assert 'class="band"' in text
    assert re.findall(r"</span>(.*?)</li>", text) == [
        "median of 30 workers",
        "worker 7",
        "lowest to highest of all workers",
    ]
    assert text.count('class="line"') == 2


def test_the_command_writes_the_page_beside_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(Path("runs/one"), whole_run())
    write_run(Path("runs/two"), whole_run())
    assert main(["report", "html", "runs/one"]) == 0
    assert main(["report", "html", "one", "two"]) == 0
    assert main(["report", "html", "one", "-o", "here.html"]) == 0
    assert Path("runs/one/report.html").read_text().startswith("<!doctype html>")
    assert "2 runs compared" in Path("report.html").read_text()
    assert "wrote here.html" in capsys.readouterr().out
    for words, message in {
        ("absent",): "echelon: there is no folder absent",
        ("one", "-o", "no/folder.html"): "echelon: cannot write no/folder.html: the folder no does not exist",
        ("one", "-o", "runs"): "echelon: cannot write runs: it is a folder",
    }.items():
        assert main(["report", "html", *words]) == 2
        printed = capsys.readouterr().err
        assert printed.startswith(message)
        assert printed.count("\n") == 1


def test_a_summary_adds_what_the_events_do_not_say(tmp_path: Path) -> None:
    events = [one for one in whole_run() if one["event"] not in ("settings", "store", "job")]
    summary = {"store": "dist_gsync", "exit_status": 1, "settings": {"network": "mlp", "data": "mnist", "lr": 0.3}}
    text = made_page(write_run(tmp_path / "run", events, json.loads(json.dumps(summary))))
    assert "mlp on mnist · dist_gsync" in text
    assert "failed (exit status 1)" in text
    assert START  # the times of the events are absolute; the page shows them from the beginning
