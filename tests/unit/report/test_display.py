"""The live display: what it shows in terminals of several sizes and through a pipe."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console
from test_state import begin, event, progress, taken, view

from echelon.observe.events import EventLog
from echelon.report.state.run import JobInfo, RunState
from echelon.report.terminal.columns import table_cells
from echelon.report.terminal.display import Display, PlainLines
from echelon.report.terminal.lines import duration, progress_line, ranges
from echelon.report.terminal.screen import screen

SSP = JobInfo("digits-cnn on digits, dist_ssync --staleness 3, -n 4 -s 2", 4, 2, bounded=True)


def training(num_workers: int = 4) -> RunState:
    """A run of 16 epochs of 120 steps, 30 s after its beginning."""
    state = RunState()
    for rank in range(num_workers):
        state.take([begin(rank, per_epoch=120, num_epochs=16)])
        for clock in (1, 300 + 7 * rank):
            report = progress(rank, 1000.0 + clock / 10, clock)
            state.take([report | {"staleness": {"0": 3, "11": 1}, "rounds_ahead": {"0": 1, "3": 1}, "wait_s": 3.0}])
        state.take([event("training", 1030.0, rank=rank, epoch=2.5, samples=32, loss=0.25, accuracy=0.93125)])
    state.take([event("validation", 1020.0, epoch=2.0, accuracy=0.9111, loss=0.2501, seconds=20.0)])
    return state


def rendered(state: RunState, width: int, height: int = 24, info: JobInfo = SSP) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=True, color_system=None)
    console.print(screen(info, state, 1030.0, 990.0, width, height))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return [line.rstrip() for line in text.splitlines()]


# --- the start


def test_the_start_says_which_processes_have_registered() -> None:
    assert rendered(RunState(), 80) == [
        SSP.title,
        "starting 7 processes… 0:40",
        "  servers  0, 1 starting",
        "  workers  0-3 starting",
    ]
    state = taken(*[event("registered") | {"who": f"server {rank} (pid 1 on host)"} for rank in range(2)])
    state.take([event("loading", rank=2)])
    assert rendered(state, 80)[1:] == [
        "starting 7 processes… 0:40",
        "  servers  0, 1 registered",
        "  workers  2 loading data; 0, 1, 3 starting",
    ]
    state.take([event("loading", rank=rank) for rank in range(4)])
    assert rendered(state, 80)[1] == "loading data… 0:40"
    state.take([event("registered") | {"who": f"worker {rank} (pid 1 on host)"} for rank in range(4)])
    assert rendered(state, 80)[1] == "connecting… 0:40"
    state.take([begin(rank) for rank in range(4)])
    assert rendered(state, 80)[1] == "first step… 0:40"


def test_a_job_without_servers_has_only_workers() -> None:
    assert rendered(RunState(), 80, info=JobInfo("one", 1))[1:] == ["starting 1 process… 0:40", "  workers  0 starting"]


# --- training


def test_80_columns() -> None:
    lines = rendered(training(), 80)
    assert re.fullmatch(r"epoch 3 of 16  ━━━[━╸ ]+ 16%  2:42 left", lines[1])
    assert lines[2:] == [
        "training    accuracy 0.9313  loss 0.2500",
        "validation  accuracy 0.9111  loss 0.2501  epoch 2",
        "                                                 rounds       updates",
        "worker  epoch  samples/s    loss  accuracy  ahead (max)  missed (max)  waiting",
        "     0    2.5         80  0.2500    0.9313      1.5 (3)      2.8 (11)      10%",
        "     1    2.6         80  0.2500    0.9313      1.5 (3)      2.8 (11)      10%",
        "     2    2.6         80  0.2500    0.9313      1.5 (3)      2.8 (11)      10%",
        "     3    2.7         80  0.2500    0.9313      1.5 (3)      2.8 (11)       9%",
    ]


def test_52_columns() -> None:
    lines = rendered(training(), 52)
    assert re.fullmatch(r"epoch 3 of 16  ━[━╸ ]+ 16%  2:42 left", lines[2])
    assert [lines[0], lines[1], *lines[3:8]] == [
        "digits-cnn on digits, dist_ssync --staleness 3, -n 4",
        "-s 2",
        "training    accuracy 0.9313  loss 0.2500",
        "validation  accuracy 0.9111  loss 0.2501  epoch 2",
        "                               rounds",
        "worker  epoch  samples/s  ahead (max)  waiting",
        "     0    2.5         80      1.5 (3)      10%",
    ]


@pytest.mark.parametrize("width", [20, 30, 40, 52, 60, 80, 100, 132, 200])
@pytest.mark.parametrize("num_workers", [1, 4, 32])
def test_nothing_is_wider_or_higher_than_the_terminal(width: int, num_workers: int) -> None:
    state = training(num_workers)
    state.take([event("validation", 1020.0, epoch=3.0, done=4000, total=10000)])
    for info in (SSP, JobInfo("a-network-with-a-name of-many-words " * 4, num_workers)):
        lines = rendered(state, width, info=info)
        assert max(map(cell_len, lines)) <= width
        assert len(lines) < 24
        table = next(index for index, line in enumerate(lines) if "worker" in line)
        assert not any("…" in line for line in lines[table:]), "columns are dropped, not cut"


def test_wide_terminals_get_more_columns_and_narrow_ones_fewer() -> None:
    shown = [len(table_cells(training(), SSP, width).columns) for width in range(10, 160)]
    assert shown == sorted(shown)
    assert (shown[0], shown[-1]) == (1, 11)


def test_a_store_in_lock_step_has_no_columns_of_staleness() -> None:
    headings = " ".join(rendered(training(), 200, info=JobInfo("bsp", 4, 2, lock_step=True)))
    assert "ahead" not in headings
    assert "missed" not in headings
    unbounded = " ".join(rendered(training(), 200, info=JobInfo("asp", 4, 2)))
    assert "ahead" not in unbounded
    assert "missed" in unbounded


def test_a_worker_alone_does_not_wait() -> None:
    assert "waiting" not in " ".join(rendered(training(1), 200, info=JobInfo("one", 1)))
    assert "waiting" in " ".join(rendered(training(1), 200, info=JobInfo("one", 1, 1)))


def test_a_validation_that_takes_long_shows_its_progress_beside_that_of_training() -> None:
    state = training()
    state.take([event("validation", 1028.0, epoch=3.0, done=500, total=10000)])
    state.take([event("validation", 1030.0, epoch=3.0, done=2500, total=10000)])
    lines = rendered(state, 80)
    assert lines[1].startswith("epoch 3 of 16  ━━━")
    assert re.fullmatch(r"validating after epoch 3  ━━━━[━╸ ]+ 2500 of 10000", lines[2])
    assert "validating after epoch 3: 2500 of 10000" in progress_line(state, 1030.0)
    state.take([event("validation", 1030.0, epoch=3.0, done=10000, total=10000)])
    state.take([event("validation", 1030.0, epoch=4.0, done=500, total=10000)])
    assert not any("validating" in line for line in rendered(state, 80)), "for less than a second, it would flicker"


def test_after_the_last_step_the_final_weights_are_measured() -> None:
    state = training(1)
    state.take([progress(0, 1030.0, 1920, "done", seconds=30.0)])
    ended = "measuring and saving the final weights"
    assert (rendered(state, 80)[1], progress_line(state, 1030.0)) == (f"{ended}…", ended)
    state.take([event("validation", 1030.0, epoch=16.0, done=2500, total=10000)])
    assert re.fullmatch(r"validating after epoch 16  ━━━━[━╸ ]+ 2500 of 10000", rendered(state, 80)[1])


def test_a_worker_that_died_is_shown_with_the_reason() -> None:
    state = training()
    died = "worker 2 (pid 4711 on machine.example) died: its connection closed"
    state.take([view([0, 1, 3], "died", died) | {"at": 1030.0}])
    lines = rendered(state, 80)
    assert [line.split()[-1] for line in lines[6:10]] == ["10%", "10%", "died", "9%"]
    assert lines[10] == "0:30  worker 2 died: its connection closed"


def test_a_worker_that_waits_is_shown_as_long_as_it_waits() -> None:
    state = training()
    state.take([event("stall", 1020.0, waiting="server 0 holds key 'w' for worker 1") | {"who": "worker 0"}])
    assert rendered(state, 80)[-1] == "0:20  worker 0 waits: server 0 holds key 'w' for worker 1"
    state.news[0] = state.news[0]._replace(at=1010.0)
    assert "waits" not in " ".join(rendered(state, 80))


def test_of_many_workers_those_that_need_attention_have_rows() -> None:
    state = training(32)
    state.take([view([rank for rank in range(32) if rank != 20], "died", "worker 20 died") | {"at": 1030.0}])
    rows = [line.split() for line in rendered(state, 80)[6:-1]]
    assert [row[0] for row in rows[:-2]] == [str(rank) for rank in range(len(rows) - 2)], "the slowest"
    assert (rows[-2][0], rows[-2][-1]) == ("20", "died")
    assert rows[-1][:2] == [str(32 - len(rows) + 1), "others"]


def test_the_table_at_the_end_has_no_training_metrics() -> None:
    """The only accuracy at the end is that of the result."""
    headings = [column.heading for column in table_cells(training(), SSP, 200, at_end=True).columns]
    assert "samples" in headings
    assert not {"accuracy", "loss"} & set(headings)


# --- texts


def test_the_state_in_one_line() -> None:
    assert progress_line(training(), 1030.0) == (
        "epoch 3 of 16, 16%, 2:42 left, 320 samples/s, training accuracy 0.9313 loss 0.2500, "
        "validation accuracy 0.9111 loss 0.2501 epoch 2"
    )


def test_a_loss_that_diverged_is_shown_as_nan() -> None:
    state = training(1)
    state.take([event("training", 1031.0, rank=0, epoch=2.6, samples=32, loss=None, accuracy=0.1)])
    assert "training accuracy 0.1000 loss nan" in progress_line(state, 1031.0)


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00"), (59.6, "1:00"), (754, "12:34"), (3723, "1:02:03")])
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_ranges() -> None:
    assert ranges([0, 1, 2, 3, 7, 9, 10]) == "0-3, 7, 9, 10"
    assert ranges([]) == ""


# --- through a pipe, and in a real terminal


def write_run(directory: Path) -> None:
    with EventLog(directory, "worker", 0) as log:
        for one in [begin(0), progress(0, 0, 1), progress(0, 0, 40, "done", seconds=2.0)]:
            fields: dict[str, Any] = {name: value for name, value in one.items() if name not in ("event", "at", "who")}
            log.write(one["event"], **fields)


def test_without_a_terminal_there_are_plain_lines(tmp_path: Path) -> None:
    out = io.StringIO()
    with Display(tmp_path, SSP, Console(file=out, width=80)) as display:
        display.update()
        write_run(tmp_path)
        display.update()
        display.print("worker 0", "a line [bold]of[/] a process\twith a tab")
    assert out.getvalue().splitlines()[:3] == [
        SSP.title,
        "starting 7 processes: 1 scheduler, 2 servers, 4 workers",
        "[worker 0] a line [bold]of[/] a process\twith a tab",
    ]
    assert "\x1b" not in out.getvalue()
    assert "worker  epoch  steps  samples" in out.getvalue()


def test_plain_lines_have_no_control_characters() -> None:
    console = Console(file=io.StringIO(), width=80)
    PlainLines(console, JobInfo("mine\x1b[2J.py", 1, 0), 0.0).start()
    assert "mine [2J.py" in console.file.getvalue()  # type: ignore[attr-defined]


def test_plain_lines_are_printed_less_often_in_a_long_run() -> None:
    out = io.StringIO()
    plain = PlainLines(Console(file=out, width=80), SSP, began=1000.0)
    plain.start()
    plain.update(RunState(), 1001.0)
    printed, state = [], training()
    for second in range(1001, 1001 + 3600):
        before = out.tell()
        plain.update(state, float(second))
        if out.tell() > before:
            printed.append(second - 1000)
    gaps = [later - earlier for earlier, later in pairwise(printed)]
    assert (printed[0], gaps[0], gaps[-1]) == (5, 5, 60)
    assert gaps == sorted(gaps)
    assert out.getvalue().count("\n") == len(printed) + 2


def test_an_encoding_without_these_characters_gets_others(tmp_path: Path) -> None:
    write_run(tmp_path)
    variables = os.environ | {"PYTHONIOENCODING": "latin-1"}
    command = [sys.executable, "-c", IN_TERMINAL, str(tmp_path)]
    done = subprocess.run(command, env=variables, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr.decode()
    assert b"a title of a run" in done.stdout


IN_TERMINAL = """
import sys
from pathlib import Path
from echelon.report.terminal.display import Display
from echelon.report.state.run import JobInfo
with Display(Path(sys.argv[1]), JobInfo("a title of a run that is longer than the terminal is wide", 4, 2)) as display:
    display.update()
    display.print("worker 0", "a line of a process … ━")
"""


@pytest.mark.parametrize("width", [52, 80])
def test_a_real_terminal(tmp_path: Path, width: int) -> None:
    write_run(tmp_path)
    terminal, end = pty.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
    variables = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    command = [sys.executable, "-c", IN_TERMINAL, str(tmp_path)]
    with subprocess.Popen(command, stdin=end, stdout=end, stderr=end, env=variables | {"TERM": "xterm"}) as process:
        os.close(end)
        data = b""
        try:
            while part := os.read(terminal, 65536):
                data += part
        except OSError:
            pass  # the other end is closed
        assert process.wait() == 0, data.decode()
    os.close(terminal)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", data.decode())
    lines = [line.split("\r")[-1] for line in text.split("\r\n")]
    assert max(map(cell_len, lines)) <= width
    assert "[worker 0] a line of a process … ━" in lines
    assert any(line.startswith("worker  epoch") for line in lines)
    assert b"\x1b[?25h" in data, "the cursor is shown again"
