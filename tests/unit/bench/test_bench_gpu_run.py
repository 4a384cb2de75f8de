"""Rows as processes: order, limits, budgets, failures. The programs are small ones that log as a trainer does."""

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
    # Two of these end only if they are under way at the same time: opening a pipe waits for its other end.
    "read.py": "import sys; open(sys.argv[2]).read(); print('INFO:root:Epoch[0] Validation-accuracy=0.5')",
    "write.py": "import sys; open(sys.argv[2], 'w').close(); print('INFO:root:Epoch[0] Validation-accuracy=0.5')",
}
BARS = (Bar(1, 0.5, "K80"),)


@pytest.fixture
def examples(tmp_path: Path) -> Path:
    for name, program in PROGRAMS.items():
        (tmp_path / name).write_text(program)
    return tmp_path


class Notes:
    def __init__(self) -> None:
        self.records: list[Record] = []
        self.lines: list[str] = []

    def run(self, plan: Plan, *rows: Row) -> list[str]:
        return [row.name for row in Runner(plan, self.records.append, self.lines.append).run(rows)]


def accuracy(name: str, script: str, arguments: str = "") -> Row:
    return Row(name, "accuracy", script, arguments, bars=BARS)


def test_speed_rows_run_first_and_each_record_has_its_figures(examples: Path) -> None:
    notes = Notes()
    plan = Plan(examples, examples / "logs", ORIGIN, jobs=2, data_dir=str(examples))
    assert notes.run(plan, accuracy("a", "learn.py"), Row("s", "speed", "speed.py", "")) == []
    assert [record.name for record in notes.records] == ["s", "a"]
    speed, learned = notes.records
    assert (speed.speeds, speed.jobs, speed.error) == ([100.0], 1, "")
    assert (learned.validation_accuracy, learned.jobs, learned.error) == ({0: 0.75}, 2, "")
    assert speed.command == "python speed.py --data-dir DIR"  # no folder of this machine
    assert (examples / "logs" / "s.log").exists()


def test_accuracy_rows_run_side_by_side(examples: Path) -> None:
    os.mkfifo(examples / "pipe")
    rows = [accuracy(name, f"{name}.py") for name in ("read", "write")]
    notes = Notes()
    notes.run(Plan(examples, examples, ORIGIN, data_dir=str(examples / "pipe"), jobs=2), *rows)
    assert sorted(record.name for record in notes.records if not record.error) == ["read", "write"]


def test_a_failed_row_says_why_and_the_next_one_runs(examples: Path) -> None:
    notes = Notes()
    notes.run(Plan(examples, examples, ORIGIN), accuracy("bad", "fail.py"), accuracy("good", "learn.py"))
    assert [record.error for record in notes.records] == ["exit status 1; no memory left", ""]
    assert any("last lines of bad:" in line for line in notes.lines)


def test_a_row_over_its_limit_is_ended(examples: Path) -> None:
    notes = Notes()
    notes.run(Plan(examples, examples, ORIGIN, limit_s=0.3), Row("stuck", "speed", "hang.py", ""))
    (record,) = notes.records
    assert record.error.startswith("ended by its time limit of 0.3 s; ")


def test_a_log_of_an_earlier_run_does_not_count(examples: Path) -> None:
    (examples / "again.log").write_text("INFO:root:Epoch[0] Validation-accuracy=0.99\n")
    notes = Notes()
    notes.run(Plan(examples, examples, ORIGIN), Row("again", "speed", "speed.py", ""))
    assert (notes.records[0].speeds, notes.records[0].validation_accuracy) == ([100.0], {})


def test_a_spent_budget_starts_nothing_and_names_what_is_missing(examples: Path) -> None:
    notes = Notes()
    rows = (Row("s", "speed", "speed.py", ""), accuracy("a", "learn.py"))
    assert notes.run(Plan(examples, examples, ORIGIN, budget_s=0), *rows) == ["s", "a"]
    assert notes.records == []


def test_nothing_is_left_running_when_a_record_cannot_be_kept(examples: Path) -> None:
    def full(record: Record) -> None:
        raise OSError("disk full")

    runner = Runner(Plan(examples, examples, ORIGIN, jobs=2), full, lambda line: None)
    with pytest.raises(OSError, match="disk full"):
        runner.run([accuracy("a", "learn.py"), accuracy("b", "hang.py")])  # the leak fixture would see b


def test_what_cannot_be_started_is_said_before_anything_runs(examples: Path) -> None:
    notes = Notes()
    with pytest.raises(UsageError, match=r"none\.py does not exist; give .* with --examples"):
        notes.run(Plan(examples, examples, ORIGIN), accuracy("a", "learn.py"), accuracy("b", "none.py"))
    assert notes.records == []
    with pytest.raises(UsageError, match="--jobs must be 1 or more, not 0"):
        Runner(Plan(examples, examples, ORIGIN, jobs=0), notes.records.append, notes.lines.append)
