"""`python -m benchmarks.compare` with real rows: the document, a failing row, and an interruption."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.compare.__main__ import main
from benchmarks.compare.rows import Row
from benchmarks.compare.run import Plan, run_rows

ROOT = Path(__file__).parents[2]


def program(name: str, code: str, seconds: float = 1) -> Row:
    return Row(name, "pushpull", name, "", shlex.join(["python", "-c", code]), seconds)


@pytest.mark.long
def test_a_quick_row_ends_in_the_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--quick", "--only", "pushpull-async", "--output", str(tmp_path)]) == 0
    assert "1 of 1 rows measured" in capsys.readouterr().out
    result = json.loads((tmp_path / "benchmarks" / "results" / "pushpull-async.json").read_text())
    document = (tmp_path / "docs" / "results.md").read_text()
    assert result["command"].startswith("echelon bench pushpull --model keys:3:64")
    assert f"| `dist_async` | echelon | {result['cases'][0]['median_ms']:.1f} ms |" in document
    assert "- costs: not measured yet: `echelon bench costs --starts 5`" in document
    assert "**How to read them.**" in document


def test_rows_go_on_after_a_failure_and_its_cause_is_shown(tmp_path: Path) -> None:
    lines: list[str] = []
    rows = [
        program("fails", "import sys; print('no memory left'); sys.exit(3)"),
        program("hangs", "import signal; signal.pause()"),
        program("works", "import pathlib, sys; pathlib.Path(sys.argv[2]).write_text('{}')"),
    ]
    plan = Plan(ROOT, tmp_path / "results", tmp_path / "docs", tmp_path / "logs", quick=True, limit_s=2.0)
    fails, hangs, works = run_rows(rows, plan, lines.append)
    assert fails.error.startswith("FAILED (status 3)")
    assert fails.error.endswith("no memory left")
    assert "ended by its time limit of 2 s" in hangs.error
    assert works.error == ""
    assert (tmp_path / "results" / "works.json").exists()
    assert [line for line in lines if line.startswith("[3/3] works: python -c")]


def test_a_terminated_comparison_ends_its_row(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    code = f"""
import os, pathlib, signal, sys
def end(number, frame):
    pathlib.Path({str(tmp_path / "removed")!r}).touch()
    sys.exit(1)
signal.signal(signal.SIGTERM, end)
print(os.getpid(), file=open({str(tmp_path / "pipe")!r}, "w"))
signal.pause()
"""
    starter = (
        "import sys; from benchmarks.compare import __main__ as compare, rows; "
        f"row = rows.Row('waits', 'pushpull', '', '', {program('waits', code).quick!r}, 1); "
        "compare.choose = lambda only: [row]; "
        f"sys.exit(compare.main(['--quick', '--output', {str(tmp_path)!r}]))"
    )
    with subprocess.Popen([sys.executable, "-c", starter], cwd=ROOT, stdout=subprocess.DEVNULL) as comparison:
        row = int((tmp_path / "pipe").read_text())
        comparison.send_signal(signal.SIGTERM)
        assert comparison.wait(30) == 130
    assert not Path(f"/proc/{row}").exists()
    assert (tmp_path / "removed").exists()  # it could remove what it had made
