"""`echelon top`: what it shows of a run, in any terminal and without one."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from test_state import begin, event, progress, view

from echelon.observe.events import FILE_NAME
from echelon.report.follow import RunFollower
from echelon.report.terminal.top import Top, top_screen

Event = dict[str, Any]


def server(rank: int, at: float, own_s: dict[str, float], decision: str, **fields: Any) -> Event:
    workers = {worker: {"clock": 9, "own_s": seconds, "late_s": 0.0} for worker, seconds in own_s.items()}
    usual = {
        "pushes": 40,
        "updates": 20,
        "held": 1,
        "sent": 2048,
        "received": 954_321,
        "memory_bytes": 186e6,
        "cpu_s": 1.0,
    }
    return event("server", at, rank=rank, store=0, workers=workers, decision=decision, **usual | fields)


def slow_run() -> list[Event]:
    """Three workers in lock-step: the same rate for all, but worker 2 takes 60 ms of its own, and the others wait."""
    events = [
        event("job", num_workers=3, num_servers=1, command="echelon launch -n 3 -s 1 python train.py"),
        event("store", store=0, name="dist_sync", scheme="BSP", groups=None, staleness=None),
    ]
    for rank in range(3):
        compute, wait = (0.06, 0.0) if rank == 2 else (0.02, 0.04)
        phases = {"steps": [[1001.0, compute, 0.001, wait, 0.001]] * 8}
        events += [begin(rank), progress(rank, 1001.0, 3) | phases, progress(rank, 1002.0, 19) | phases]
    own = {"0": 0.02, "1": 0.021, "2": 0.06}
    return [
        *events,
        server(0, 1001.0, own, "worker 0, clock 3: held: not all workers have pushed (worker 2)"),
        server(
            0, 1002.0, own, "worker 1, clock 19: held: not all workers have pushed (worker 2)", updates=36, cpu_s=1.25
        ),
    ]


def follower_of(folder: Path, events: list[Event]) -> RunFollower:
    (folder / FILE_NAME).write_text("".join(json.dumps(one) + "\n" for one in events))
    follower = RunFollower(folder)
    follower.read_all()
    return follower


def shown(follower: RunFollower, width: int = 100, height: int = 30, now: float = 1002.0) -> list[str]:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(top_screen(follower.state, follower.files, now, width, height))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return [line.rstrip() for line in text.splitlines()]


def test_the_slow_worker_is_named_although_all_have_the_same_rate(tmp_path: Path) -> None:
    lines = shown(follower_of(tmp_path, slow_run()))
    assert lines[0] == f"{tmp_path.name}: training"
    assert "dist_sync, echelon launch -n 3 -s 1 python train.py" in lines
    (slow,) = [line for line in lines if "slower" in line]
    assert slow.startswith(
        "worker 2 is 2.9x slower: 60 ms per step, where the median of the others is 20 ms: it computes"
    )


def test_servers_and_the_last_decision_are_shown(tmp_path: Path) -> None:
    lines = shown(follower_of(tmp_path, slow_run()))
    assert "dist_sync (BSP): server 0: worker 1, clock 19: held: not all workers have pushed (worker 2)" in lines
    assert lines[-2].split() == ["server", "updates/s", "held", "CPU", "memory", "received", "sent"]
    assert lines[-1].split() == ["0", "16", "1", "25%", "186", "MB", "954", "kB", "2.0", "kB"]


def test_a_worker_that_died_is_shown(tmp_path: Path) -> None:
    gone = view([0, 1], "died", "worker 2 died: its connection closed")
    lines = shown(follower_of(tmp_path, [*slow_run(), gone]))
    assert any(line.split()[:1] == ["2"] and line.endswith("died") for line in lines)
    assert not any("slower" in line for line in lines), "a worker that died is not slow"


@pytest.mark.parametrize(("width", "height"), [(40, 12), (80, 24), (200, 60)])
def test_it_fits_the_terminal(tmp_path: Path, width: int, height: int) -> None:
    many = [*slow_run(), *(begin(rank) for rank in range(3, 64)), *(progress(rank, 1002.0, 9) for rank in range(3, 64))]
    lines = shown(follower_of(tmp_path, many), width, height)
    assert max(map(len, lines)) <= width
    assert len(lines) <= max(height, 22), "small terminals show at least three rows"
    assert "it computes for 60 ms (others 20 ms)" in " ".join(lines), "a reason is wrapped, not cut"


def test_a_run_without_events(tmp_path: Path) -> None:
    lines = shown(follower_of(tmp_path, []))
    assert lines == [f"{tmp_path.name}: waiting", "The job has not written any event yet."]


def test_lines_without_a_terminal_wait_for_the_first_event_and_know_the_job_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = event("job", num_workers=2, num_servers=1, command="mine.py")
    ended = [begin(0), progress(0, 1009.0, 40, "done", seconds=9.0)]
    written = iter([[job], ended])
    follower = follower_of(tmp_path, [])

    def next_events(_: float) -> None:
        with (tmp_path / FILE_NAME).open("a") as file:
            file.writelines(json.dumps(one) + "\n" for one in next(written))

    monkeypatch.setattr("echelon.report.terminal.top.time.sleep", next_events)
    console = Console(file=io.StringIO(), width=100)
    Top(follower, console).show()
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert text.startswith("The job has not written any event yet.\nstarting 4 processes\n")


def test_without_a_terminal_the_end_is_printed(tmp_path: Path) -> None:
    done = [progress(rank, 1009.0, 40, "done", seconds=9.0) for rank in range(3)]
    console = Console(file=io.StringIO(), width=100)
    Top(follower_of(tmp_path, [*slow_run(), *done]), console).show()
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert text.startswith(f"{tmp_path.name}: finished")
    assert "\x1b" not in text
