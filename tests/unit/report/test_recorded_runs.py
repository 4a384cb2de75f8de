"""Reading runs: whole, still going, killed, of a user's own program, with lines that are no events, and no runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from made_runs import START, begin, event, report, whole_run, write_run

from echelon.errors import EchelonError
from echelon.report.charts.recorded import RecordedRun, find_run, read_run, read_runs
from echelon.report.follow import RunFollower


def gone(departure: str) -> dict[str, Any]:
    return event("view", 6.0, "scheduler 0", number=2, workers=[], reason="worker 0 …", departure=departure)


def test_a_whole_run_has_its_settings_its_machine_and_its_time(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "mine", whole_run()))
    assert (run.name, run.store, run.bound, run.seconds) == ("mine", "dist_ssync", 3, 20.0)
    assert run.samples_per_s == 2 * 32 * 40 / 20.0
    assert run.settings["lr"] == 0.05
    assert "event" not in run.settings
    assert run.environment["command"] == "echelon train -n 2"
    assert run.environment["commit"] == "0123456789ab-dirty"
    assert run.environment["machine"] == "a CPU, 2 cores, 8.0 GiB"
    assert run.status() == "finished"


def test_a_users_program_has_reports_and_no_beginning(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "own", [report(0, 1.0, 10), report(1, 1.5, 9), report(0, 5.0, 50)]))
    assert (run.start, run.seconds, run.settings, run.store) == (START + 1.0, 4.0, {}, None)
    assert run.history.workers[0].spans()[0].samples == 40 * 32


@pytest.mark.parametrize(
    ("events", "summary", "now", "status"),
    [
        pytest.param([begin(0), report(0, 5.0, 3)], None, 8.0, "running", id="still going"),
        pytest.param([begin(0), report(0, 5.0, 3)], None, 900.0, "did not end", id="killed with its launcher"),
        pytest.param([begin(0), report(0, 5.0, 3)], {"exit_status": 1}, 6.0, "failed (exit status 1)", id="failed"),
        pytest.param([begin(0)], {"exit_status": 137}, 6.0, "failed (exit status 137, SIGKILL)", id="killed"),
        pytest.param([begin(0)], {"exit_status": 130}, 6.0, "stopped (exit status 130, SIGINT)", id="stopped"),
        pytest.param([begin(0), report(0, 5.0, 40, "done", seconds=5.0)], None, 900.0, "finished", id="no summary"),
        pytest.param([report(0, 5.0, 3), gone("left")], None, 900.0, "finished", id="a user's program"),
        pytest.param([report(0, 5.0, 3), gone("died")], None, 9.0, "ended; 1 of 1 workers failed", id="died"),
    ],
)
def test_a_run_says_how_it_ended(
    tmp_path: Path, events: list[dict[str, Any]], summary: dict[str, Any] | None, now: float, status: str
) -> None:
    assert read_run(write_run(tmp_path / "run", events, summary)).status(START + now).startswith(status)


def test_lines_that_are_no_events_are_counted(tmp_path: Path) -> None:
    lines = [b'{"at": 1.0, "event": "pro', b"[1, 2]", b'{"event": "progress"}', b'"\xff\xfe"', b"{}"]
    lines += [b'{"at": 1.0, "event": "begin", "rank": "<script>"}', b'{"at": "x", "event": "begin", "rank": 0}']
    folder = write_run(tmp_path / "torn", [begin(0), report(0, 1.0, 5)])
    with (folder / "events.jsonl").open("ab") as file:
        file.write(b"\n".join(lines) + b'\n{"at": 1.0, "half a li')
    run = read_run(folder)
    assert (run.num_events, run.unreadable) == (2, len(lines))
    assert run.state.workers[0].clock == 5


def test_a_summary_that_was_cut_off_does_not_hide_the_events(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "cut", whole_run())
    (folder / "summary.json").write_text('{"store": "dist_')
    assert read_run(folder).summary == {}


def test_paths_that_are_no_runs_have_errors_that_say_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(Path("runs/one"), whole_run())
    (tmp_path / "nothing").mkdir()
    (tmp_path / "file").write_text("")
    write_run(Path("empty"), [])
    write_run(Path("torn"), []).joinpath("events.jsonl").write_text("{\n")
    for path, words in {
        "absent": "there is no folder absent; the newest runs here are runs/one",
        "nothing": "has no events.jsonl",
        "file": "file is not a folder; give the folder of a run, which has an events.jsonl",
        "runs": "give runs/one",
        "empty": "contains no event",
        "torn": "1 lines are not events",
    }.items():
        with pytest.raises(EchelonError, match=words) as error:
            read_runs([path])
        assert "\n" not in str(error.value)
    with pytest.raises(EchelonError, match="given twice"):
        read_runs(["one", "runs/one/events.jsonl"])


def test_a_run_is_found_by_its_name_its_folder_or_a_file_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(Path("runs/one"), whole_run(), {})
    (tmp_path / "runs" / "latest").symlink_to("one")
    for path in ("one", "runs/one", "runs/latest", "runs/one/events.jsonl", "runs/one/summary.json"):
        assert find_run(path).resolve() == tmp_path / "runs" / "one"
    assert read_runs(["runs/latest"])[0].name == "one"


def test_runs_with_the_same_name_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    folders = [str(write_run(tmp_path / where / "run", whole_run())) for where in ("a", "b")]
    assert [run.name for run in read_runs(folders)] == ["a/run", "b/run"]


def slow_run(tmp_path: Path, own_s: dict[str, float]) -> RecordedRun:
    """Return a run whose server reports these own times for 20 s."""
    fields = {"pushes": 1, "updates": 1, "held": 0, "sent": 0, "received": 0, "memory_bytes": 1, "cpu_s": 0.1}
    arrivals = {rank: {"clock": 3, "own_s": own, "late_s": 0.0, "last": 0, "at": 0.0} for rank, own in own_s.items()}
    events = [begin(rank) for rank in range(3)]
    for second in range(1, 21):
        events += [report(rank, float(second), second) for rank in range(3)]
        server = {"rank": 0, "store": 0, "decision": "", "workers": arrivals}
        events.append(event("server", second + 0.1, "server 0", **fields, **server))
    return read_run(write_run(tmp_path / "run", events))


def test_the_slow_worker_is_named_with_its_factor(tmp_path: Path) -> None:
    sentences = slow_run(tmp_path, {"0": 0.02, "1": 0.06, "2": 0.02}).verdicts.sentences()
    assert len(sentences) == 1
    assert sentences[0].startswith("Worker 1 was slow for 100% of the time: its own part of a step took 3.0 times")


def test_equal_workers_are_not_called_slow(tmp_path: Path) -> None:
    verdicts = slow_run(tmp_path, {"0": 0.02, "1": 0.021, "2": 0.02}).verdicts
    assert verdicts.sentences() == []
    assert verdicts.seconds > 15


def test_a_long_log_is_read_in_parts(tmp_path: Path) -> None:
    """No line at the border of two parts is lost, and a part without an event does not end the reading."""
    lines = [json.dumps(event("warning", i, text="x" * (i % 90))) for i in range(500)]
    lines[100:100] = ["no event"] * 1000
    folder = write_run(tmp_path / "run", [])
    (folder / "events.jsonl").write_text("\n".join([*lines, '{"half":']))
    taken: list[float] = []
    follower = RunFollower(folder, lambda state, one: taken.append(one["at"] - START))
    parts = 1
    while follower.read(1000):
        parts += 1
    assert parts > 20
    assert (taken, follower.files.unreadable) == ([float(i) for i in range(500)], 1000)
