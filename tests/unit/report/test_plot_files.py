"""`echelon report plots`: every chart of the page as PNG and SVG."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
from made_runs import begin, event, report, validation, whole_run, write_run

from echelon.cli.main import main
from echelon.report.charts.all_charts import all_charts
from echelon.report.charts.recorded import read_runs
from echelon.report.colours import run_colours
from echelon.report.plots.charts import chart_figure


def test_every_chart_is_written_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(Path("runs/one"), whole_run())
    assert main(["report", "plots", "one", "-o", "drawn"]) == 0
    names = ["accuracy-epoch", "accuracy-seconds", "loss-epoch", "loss-seconds", "phases", "rates", "rounds-ahead"]
    names += ["steps", "timeline", "updates-missed"]
    assert sorted(path.name for path in Path("drawn").iterdir()) == [
        f"{n}.{kind}" for n in names for kind in ("png", "svg")
    ]
    assert capsys.readouterr().out == "wrote 10 charts as png and svg to drawn/\n"
    assert "validation" in Path("drawn/accuracy-epoch.svg").read_text()
    ElementTree.parse("drawn/timeline.svg")
    Path("taken").write_text("")
    assert main(["report", "plots", "one", "-o", "taken"]) == 2
    assert "it is a file; give a folder" in capsys.readouterr().err


def test_names_of_runs_with_any_letter_can_be_drawn(tmp_path: Path) -> None:
    events = [begin(0), report(0, 1.0, 5), report(0, 2.0, 9), validation(1.0, 1.0, loss=None)]
    events.append(event("view", 1.5, number=2, workers=[], reason="it died: $x^", departure="died"))
    folders = [write_run(tmp_path / name, events) for name in ("_a$b$^{", "b<c>&")]
    runs = read_runs(list(map(str, folders)))
    charts = all_charts(runs, run_colours([None, None]))
    assert {name for name, _ in charts} == {"", "_a$b$^{", "b<c>&"}
    for name, chart in charts:
        chart_figure(chart, name).canvas.draw()
