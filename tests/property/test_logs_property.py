"""Lines of any workers, written by the one writer in any interleaving, are read as the same figures."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.errors import EchelonError
from echelon.report.logs.epochs import read_logs
from echelon.report.logs.lines import EpochFigure, SpeedFigure, figures_of
from echelon.report.logs.text import FORMATS, columns, rows_of
from echelon.train import log_lines

PREFIXES = (
    "[worker {rank}] INFO:root:",
    "2016-05-26 10:11:12,345 Node[{rank}] ",
    "[1,{rank}]<stderr>:INFO:root:",
)
NAMES = st.sampled_from(["accuracy", "cross-entropy", "top_k_accuracy_5", "perplexity"])
VALUES = st.integers(0, 10**9).map(lambda number: number / 10**6)  # what %f writes is read back exactly
EPOCHS = st.integers(0, 5)


class Written(NamedTuple):
    """A line and what it says."""

    line: str
    figure: EpochFigure | SpeedFigure


@st.composite
def lines(draw: st.DrawFn) -> Written:
    epoch, name, value, batch = draw(EPOCHS), draw(NAMES), draw(VALUES), draw(st.none() | st.integers(0, 99))
    match draw(st.sampled_from(["train", "validation", "time", "speed"])):
        case "train":
            return Written(log_lines.train_line(epoch, name, value), EpochFigure("train", epoch, name, value))
        case "validation":
            figure = EpochFigure("validation", epoch, name, value, batch=batch)
            return Written(log_lines.validation_line(epoch, name, value, batch), figure)
        case "time":
            seconds = draw(st.integers(0, 10**7)) / 1000
            return Written(log_lines.time_line(epoch, seconds), EpochFigure("time", epoch, "", seconds))
    speed, metrics = draw(st.integers(1, 10**8)) / 100, draw(st.dictionaries(NAMES, VALUES, max_size=3))
    first = draw(st.integers(0, 99))
    line = log_lines.speed_line(epoch, first, first + 20, speed, metrics)
    return Written(line, SpeedFigure(epoch, first, first + 20, speed, tuple(metrics.items())))


@given(lines())
def test_a_written_line_is_read_as_what_was_written(written: Written) -> None:
    assert list(figures_of(written.line)) == [written.figure]


@settings(max_examples=50)
@given(st.lists(st.lists(lines(), max_size=8), min_size=1, max_size=4), st.sampled_from(PREFIXES), st.data())
def test_any_interleaving_of_workers_gives_the_same_figures(
    workers: list[list[Written]], prefix: str, data: st.DataObject
) -> None:
    written = [(rank, one) for rank, own in enumerate(workers) for one in own]
    if not written:
        return
    order = data.draw(st.permutations(written))
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        log.write_text("".join(f"{prefix.format(rank=rank)}{one.line}\nanother line\n" for rank, one in order))
        together = read_logs([str(log)])
    expected: dict[tuple[int, str, str], list[float]] = {}
    speeds: dict[tuple[int, str], list[float]] = {}
    for rank, one in order:
        if isinstance(one.figure, SpeedFigure):
            speeds.setdefault((one.figure.epoch, f"worker {rank}"), []).append(one.figure.samples_per_s)
        elif one.figure.batch is None:
            key = (one.figure.epoch, one.figure.kind, one.figure.name)
            expected.setdefault(key, []).append(one.figure.value)
    found = {
        (epoch.number, kind, name): values
        for epoch in together.epochs.values()
        for (kind, name), values in epoch.values.items()
    }
    assert found == expected
    assert speeds == {
        (epoch.number, worker): [line.samples_per_s for line in lines]
        for epoch in together.epochs.values()
        for worker, lines in epoch.speeds.items()
    }


NUMBERS = st.sampled_from(["0", "3", "9" * 5000, "-1", "0.5", "-5.00", "nan", "inf", "-inf", "1e999", "1.2.3", "", "٣"])
PIECES = st.sampled_from(
    ["Epoch[0] ", "Iter[1] ", "Batch [0-20]\t", "Node[2] ", "[worker 1] ", "\n", "\r", "\x00", "é"]
)
LINES = st.one_of(
    st.builds("Epoch[{}] Train-accuracy={}{}".format, NUMBERS, NUMBERS, PIECES),
    st.builds("Epoch[{}] Batch [{}]\tSpeed: {} samples/sec\ta={}".format, NUMBERS, NUMBERS, NUMBERS, NUMBERS),
    st.builds("[worker {}] Epoch[0] Time cost={}".format, NUMBERS, NUMBERS),
    PIECES,
)


@settings(max_examples=300)
@given(st.binary(max_size=40) | st.lists(LINES, max_size=6).map(lambda lines: "\n".join(lines).encode()))
def test_any_file_is_read_or_is_an_error_of_one_line(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "log").write_bytes(content)
        text = ""
        try:
            training = read_logs([str(Path(folder) / "log")])
        except EchelonError as error:
            text = str(error)
        else:
            shown = columns(training, [], "workers")
            for write in FORMATS.values():
                write(rows_of(training, shown), shown)
    assert "\n" not in text
