"""Rows as processes: order, time limits, budgets, failures. Small programs print the log lines of a trainer."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.gpu.results import Origin, Record
from benchmarks.gpu.rows import Bar, Row
from benchmarks.gpu.run import Plan, Runner
from echelon.errors import UsageError

ORIGIN = Origin("unknown", "none", "2", "made up")
PROGRAMS = {
    "speed.py": "print('INFO:root:Epoch[0] Batch [0-20]\\tSpeed: 100.00 samples/sec')",
    "learn.py": "print('INFO:root:Epoch[0] Validation-accuracy=0.750000')",
    "fail.py": "import sys; sys.exit('no memory left')",
    "hang.py": "import signal; signal.pause()",
    # These two end only if they run at the same time, because opening a pipe waits for its other end.
    "read.py": "import sys; open(sys.argv[2]).read(); print('INFO:root:Epoch[0] Validation-accuracy=0.5')",
    "write.py": "import sys; open(sys.argv[2], 'w').close(); print('INFO:root:Epoch[0] Validation-accuracy=0.5')",
}
BARS = (Bar(1, 0.5, "K80"),)


@pytest.fixture
def examples(tmp_path: Path) -> Path:
    for name, program in PROGRAMS.items():
        (tmp_path / name).write_text(program)
    return tmp_path


class Recorder:
    """Runs rows and stores records and progress lines."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.lines: list[str] = []

    def run(self, plan: Plan, *rows: Row) -> list[str]:
        return [row.name for row in Runner(plan, self.records.append, self.lines.append).run(rows)]


def accuracy(name: str, script: str, arguments: str = "") -> Row:
    return Row(name, "accuracy", script, arguments, bars=BARS)


def test_speed_rows_run_first_and_each_record_has_its_figures(examples: Path) -> None:
    recorder = Recorder()
    plan = Plan(examples, examples / "logs", ORIGIN, jobs=2, data_dir=str(examples))
    assert recorder.run(plan, accuracy("a", "learn.py"), Row("s", "speed", "speed.py", "")) == []
    assert [record.name for record in recorder.records] == ["s", "a"]
    speed, learned = recorder.records
    assert (speed.speeds, speed.jobs, speed.error) == ([100.0], 1, "")
    assert (learned.validation_accuracy, learned.jobs, learned.error) == ({0: 0.75}, 2, "")
    assert speed.command == "python speed.py --data-dir DIR"  # without paths of this machine
    assert (examples / "logs" / "s.log").exists()


def test_accuracy_rows_run_at_the_same_time(examples: Path) -> None:
    os.mkfifo(examples / "pipe")
    rows = [accuracy(name, f"{name}.py") for name in ("read", "write")]
    recorder = Recorder()
    recorder.run(Plan(examples, examples, ORIGIN, data_dir=str(examples / "pipe"), jobs=2), *rows)
    assert sorted(record.name for record in recorder.records if not record.error) == ["read", "write"]


def test_a_failed_row_shows_its_error_and_the_next_one_runs(examples: Path) -> None:
    recorder = Recorder()
    recorder.run(Plan(examples, examples, ORIGIN), accuracy("bad", "fail.py"), accuracy("good", "learn.py"))
    assert [record.error for record in recorder.records] == ["exit status 1; no memory left", ""]
    assert any("last lines of bad:" in line for line in recorder.lines)


def test_a_row_that_exceeds_its_time_limit_is_ended(examples: Path) -> None:
    recorder = Recorder()
    recorder.run(Plan(examples, examples, ORIGIN, limit_s=0.3), Row("stuck", "speed", "hang.py", ""))
    (record,) = recorder.records
    assert record.error.startswith("ended by its time limit of 0.3 s; ")


def test_the_log_of_an_earlier_run_is_ignored(examples: Path) -> None:
    (examples / "again.log").write_text("INFO:root:Epoch[0] Validation-accuracy=0.99\n")
    recorder = Recorder()
    recorder.run(Plan(examples, examples, ORIGIN), Row("again", "speed", "speed.py", ""))
    assert (recorder.records[0].speeds, recorder.records[0].validation_accuracy) == ([100.0], {})


def test_no_row_starts_when_the_budget_is_spent(examples: Path) -> None:
    recorder = Recorder()
    rows = (Row("s", "speed", "speed.py", ""), accuracy("a", "learn.py"))
    assert recorder.run(Plan(examples, examples, ORIGIN, budget_s=0), *rows) == ["s", "a"]
    assert recorder.records == []


def test_no_process_is_left_when_a_record_cannot_be_stored(examples: Path) -> None:
    def disk_full(record: Record) -> None:
        raise OSError("disk full")

    runner = Runner(Plan(examples, examples, ORIGIN, jobs=2), disk_full, lambda line: None)
    with pytest.raises(OSError, match="disk full"):
        runner.run([accuracy("a", "learn.py"), accuracy("b", "hang.py")])  # the leak fixture would report b


def test_a_missing_script_is_reported_before_any_row_runs(examples: Path) -> None:
    recorder = Recorder()
    with pytest.raises(UsageError, match=r"none\.py does not exist; give .* with --examples"):
        recorder.run(Plan(examples, examples, ORIGIN), accuracy("a", "learn.py"), accuracy("b", "none.py"))
    assert recorder.records == []
    with pytest.raises(UsageError, match="--jobs must be 1 or more, not 0"):
        Runner(Plan(examples, examples, ORIGIN, jobs=0), recorder.records.append, recorder.lines.append)
