"""`python -m benchmarks.gpu` with real trainers on the CPU, from the command to the tables."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.__main__ import main
from benchmarks.gpu.results import Origin, Record
from benchmarks.gpu.rows import Bar, Row
from benchmarks.gpu.run import Plan, Runner

ROOT = Path(__file__).parents[2]
DIGITS = """
from echelon.train import script

parser = script.make_parser(None)
parser.set_defaults(network="digits-cnn", batch_size=64, lr=0.05)

if __name__ == "__main__":
    script.run(parser, data="digits")
"""


@pytest.mark.long
def test_the_tiny_list_runs_and_its_tables_are_in_the_document(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    docs, results = tmp_path / "results.md", tmp_path / "gpu-tiny.json"
    docs.write_text("# Results\n<!-- gpu:begin -->\n<!-- gpu:end -->\n")
    command = ["--list", "tiny", "--json", str(results), "--docs", str(docs)]
    status = main([*command, "--data-note", "synthetic", "--commit", "a1b2"])
    captured = capfd.readouterr()
    assert status == 0, captured.err
    rows = json.loads(results.read_text())["rows"]
    assert [row["name"] for row in rows] == ["tiny-local", "tiny-dist-sync"]
    assert [len(row["speeds"]) for row in rows] == [6, 6]  # batches 5, 10 and 15 of two epochs
    assert all(row["engine"].startswith("engine eager") for row in rows)
    assert rows[0]["origin"]["commit"] == "a1b2"
    assert "`echelon launch -n 1 -s 1 python train_cifar10.py" in docs.read_text()
    assert docs.read_text().split("-->\n", 1)[1].startswith(captured.out[:100])
    assert str(tmp_path) not in results.read_text()
    assert main([*command, "--missing"]) == 0
    assert "python train_cifar10.py" not in capfd.readouterr().err  # all rows have records, so none was started


@pytest.mark.long
def test_an_accuracy_run_gives_one_accuracy_per_epoch(tmp_path: Path) -> None:
    (tmp_path / "train_digits.py").write_text(DIGITS)
    records: list[Record] = []
    bars = (Bar(1, 0.5, ""), Bar(2, 0.5, ""))
    row = Row("digits", "accuracy", "train_digits.py", "--devices cpu --num-epochs 2", bars=bars)
    plan = Plan(tmp_path, tmp_path, Origin("unknown", "none", "2", "digits", extra="--seed 3"), data_dir=str(tmp_path))
    assert Runner(plan, records.append, lambda line: None).run([row]) == []
    (record,) = records
    assert record.error == ""
    assert set(record.validation_accuracy) == set(record.train_accuracy) == set(record.epoch_s) == {0, 1}
    assert record.validation_accuracy[1] > 0.5
    assert record.command.endswith("--data-dir DIR --seed 3")


@pytest.mark.long
def test_a_scheme_row_gives_the_seconds_to_its_accuracy(tmp_path: Path) -> None:
    (tmp_path / "train_digits.py").write_text(DIGITS)
    records: list[Record] = []
    arguments = "--devices cpu --num-epochs 9 --kv-store dist_async --target-accuracy 0.5"
    row = Row("digits", "schemes", "train_digits.py", arguments, launch="-n 2 -s 1", to_accuracy=0.5)
    plan = Plan(tmp_path, tmp_path, Origin("unknown", "none", "2", "digits"))
    assert Runner(plan, records.append, lambda line: None).run([row]) == []
    (record,) = records
    assert record.error == ""
    assert record.seconds_to(0.5) == record.curve[-1][0]
    assert 0 < record.curve[-1][0] < record.wall_s
    assert record.seconds_to(1.1) is None
    assert record.command.startswith("echelon launch -n 2 -s 1 --run-dir DIR python train_digits.py --devices cpu ")


@pytest.mark.long
def test_a_failure_replaces_figures_only_without_keep(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    trainer, results = tmp_path / "train_cifar10.py", tmp_path / "gpu.json"
    command = ["--list", "tiny", "--only", "tiny-local", "--examples", str(tmp_path)]
    command += ["--json", str(results)]
    trainer.write_text("print('INFO:root:Epoch[0] Batch [0-20]\\tSpeed: 100.00 samples/sec')")
    assert main(command) == 0
    trainer.write_text("import sys; sys.exit('no memory left')")
    assert main([*command, "--keep"]) == 1
    assert "FAILED" in capfd.readouterr().err
    assert json.loads(results.read_text())["rows"][0]["speeds"] == [100.0]
    assert main([*command, "--budget-s", "0"]) == 1
    assert "not run because the budget of 0 s is spent: tiny-local" in capfd.readouterr().err
    assert main(command) == 1
    assert json.loads(results.read_text())["rows"][0]["error"] == "exit status 1; no memory left"


@pytest.mark.long
def test_a_terminated_benchmark_ends_its_trainer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "train_cifar10.py").write_text(
        f"import os, signal; print(os.getpid(), file=open({str(tmp_path / 'pipe')!r}, 'w'), flush=True); signal.pause()"
    )
    command = [sys.executable, "-m", "benchmarks.gpu", "--list", "tiny", "--only", "tiny-local"]
    command += ["--examples", str(tmp_path), "--json", str(tmp_path / "gpu.json")]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, cwd=ROOT) as bench:
        trainer = int((tmp_path / "pipe").read_text())
        bench.send_signal(signal.SIGTERM)
        assert bench.wait(30) == 130
    assert not Path(f"/proc/{trainer}").exists()
