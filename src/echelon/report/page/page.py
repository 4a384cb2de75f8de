"""The whole file: head, style, and the sections of one run or of several."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.resources import files

from echelon import __version__
from echelon.report.charts.learning import learning_charts
from echelon.report.charts.recorded import RecordedRun
from echelon.report.colours import DARK, run_colours
from echelon.report.page.frame import css_name
from echelon.report.page.html import Html, element, join
from echelon.report.page.sections import charts, comparison, header, run_sections, title


def page(runs: Sequence[RecordedRun], now: datetime | None = None) -> str:
    """Return the page of these runs. Several runs are compared first, then each has a part of its own."""
    colours = run_colours([run.store for run in runs])
    if len(runs) == 1:
        name = f"{title(runs[0])} – {runs[0].name}"
        body = join(
            element("header", header(runs[0])),
            run_sections(runs[0], colours[0], learning=charts(learning_charts(runs, colours))),
        )
    else:
        name = f"{len(runs)} runs compared: {', '.join(run.name for run in runs)}"
        body = join(
            element("header", element("h1", f"{len(runs)} runs compared")),
            comparison(runs, colours),
            *(_part(run, colour, index) for index, (run, colour) in enumerate(zip(runs, colours, strict=True))),
        )
    made = (now or datetime.now(UTC)).strftime("%Y-%m-%d %H:%M:%S UTC")
    footer = element(
        "footer", f"Made by echelon {__version__} on {made}. Times count from the first worker's beginning."
    )
    return document(name, join(element("main", body), footer))


def _part(run: RecordedRun, colour: str, index: int) -> Html:
    """Return the part of one of several runs."""
    content = join(element("header", header(run, level=2)), run_sections(run, colour, level=3))
    return element("article", content, id_=f"run-{index}")


def document(name: str, body: Html) -> str:
    """Return a document with its style inside, so that the file needs nothing else."""
    style = Html(f"{palette()}{files('echelon.report.page').joinpath('style.css').read_text()}")
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", name),
        element("style", style),
    )
    return f'<!doctype html>\n<html lang="en">{head}{element("body", body)}</html>\n'


def palette() -> str:
    """Return the colours of lines and areas as CSS variables, for light and dark pages."""
    light = "".join(f"--{css_name(colour)}:{colour};" for colour in DARK)
    dark = "".join(f"--{css_name(colour)}:{other};" for colour, other in DARK.items())
    return f":root{{{light}}}@media(prefers-color-scheme:dark){{:root{{{dark}}}}}"
