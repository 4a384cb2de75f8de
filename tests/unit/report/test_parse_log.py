"""`echelon report parse-log` and `tools/parse_log.py`: their output, byte for byte, and their errors."""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path

import pytest

from echelon.cli.main import main
from echelon.cli.report.parse_log import main_like_mxnet

LOG = """\
[worker 0] INFO:root:Epoch[0] Batch [0-20]\tSpeed: 100.00 samples/sec\taccuracy=0.100000
[worker 1] INFO:root:Epoch[0] Batch [0-20]\tSpeed: 50.00 samples/sec\taccuracy=0.100000
[worker 0] INFO:root:Epoch[0] Train-accuracy=0.538261
[worker 0] INFO:root:Epoch[0] Train-top_k_accuracy_5=0.900000
[worker 0] INFO:root:Epoch[0] Time cost=70.614
[worker 1] INFO:root:Epoch[0] Train-accuracy=0.538262
[worker 1] INFO:root:Epoch[0] Train-top_k_accuracy_5=0.800000
[worker 1] INFO:root:Epoch[0] Time cost=70.716
[worker 0] INFO:root:Epoch[0] Validation-accuracy=0.666992
[worker 0] INFO:root:Epoch[0] Validation-top_k_accuracy_5=0.950000
[worker 0] INFO:root:Epoch[1] Train-accuracy=0.750000
[worker 0] INFO:root:Epoch[2] Batch [0-20]\tSpeed: 100.00 samples/sec\taccuracy=0.100000
"""


@pytest.fixture
def log(tmp_path: Path) -> str:
    (tmp_path / "train.log").write_text(LOG)
    return str(tmp_path / "train.log")


def test_the_script_prints_what_mxnets_prints(log: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main_like_mxnet([log]) == 0
    assert capsys.readouterr().out == (
        "| epoch | train-accuracy | val-accuracy | time |\n"
        "| --- | --- | --- | --- |\n"
        "|  1 | 0.538261 | 0.666992 | 70.7 |\n"
        "|  2 | 0.750000 |  |  |\n"
    )
    assert main_like_mxnet([log, "--format", "none", "--metric-names", "top_k", "accuracy"]) == 0
    assert capsys.readouterr().out == (
        "epoch\ttrain-top_k\ttrain-accuracy\tval-top_k\tval-accuracy\ttime\n"
        " 1\t0.850000\t0.538261\t0.950000\t0.666992\t70.7\n"
        " 2\t\t0.750000\t\t\t\n"
    )


def test_the_command_adds_speeds_and_all_metrics(log: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "parse-log", log, "--speed", "workers", "--format", "csv"]) == 0
    assert capsys.readouterr().out == (
        "epoch,train-accuracy,train-top_k_accuracy_5,val-accuracy,val-top_k_accuracy_5,time,"
        "speed-worker-0,speed-worker-1,speed\n"
        f"1,{(0.538261 + 0.538262) / 2},{(0.9 + 0.8) / 2},0.666992,0.95,{(70.614 + 70.716) / 2},100.0,50.0,150.0\n"
        "2,0.75,,,,,,,\n"
        "3,,,,,,100.0,,100.0\n"
    )
    assert main(["report", "parse-log", log, "--metric-names", "accuracy", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)[1] == {
        "epoch": 2,
        "train-accuracy": 0.75,
        "val-accuracy": None,
        "time": None,
    }


def test_epochs_are_sorted_by_the_command_and_in_order_of_appearance_in_the_script(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "log").write_text("".join(f"Epoch[{epoch}] Train-accuracy=0.500000\n" for epoch in (3, 4, 0)))
    for run, order in ((lambda given: main(["report", "parse-log", *given]), [1, 4, 5]), (main_like_mxnet, [4, 5, 1])):
        assert run([str(tmp_path / "log"), "--format", "none"]) == 0
        assert [int(line.split()[0]) for line in capsys.readouterr().out.splitlines()[1:]] == order


def test_notes_and_errors_go_to_standard_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "log").write_text("Epoch[0] Train-accuracy=nan\nEpoch[0] Train-accuracy=0.500000\n")
    assert main(["report", "parse-log", str(tmp_path / "log")]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[2] == "|  1 | 0.500000 |  |  |"
    assert err == "echelon: epoch 1: 1 of 2 values of train-accuracy are nan or inf and are not in its mean\n"
    assert main(["report", "parse-log", str(tmp_path / "other")]) == 2
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"echelon: {tmp_path}/other: No such file or directory; give the path of a log file\n")
    assert main(["report", "parse-logs", "x"]) == 2
    assert "did you mean 'parse-log'" in capsys.readouterr().err


@pytest.mark.parametrize("speed", ["0.00", "nan", "inf", "-3.00"])
def test_a_speed_that_cannot_be_is_noted_where_speeds_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], speed: str
) -> None:
    path = tmp_path / "log"
    path.write_text(
        f"Epoch[0] Batch [0-20]\tSpeed: {speed} samples/sec\taccuracy=0.5\n"
        "Epoch[0] Batch [20-40]\tSpeed: 50.00 samples/sec\taccuracy=0.5\n"
        "Epoch[0] Time cost=1.000\n"
    )
    assert main(["report", "parse-log", str(path), "--speed", "total"]) == 0
    note = "echelon: epoch 1: 1 of 2 speeds are nan, inf, negative or 0 and are not in its mean\n"
    assert capsys.readouterr().err == note
    assert main(["report", "parse-log", str(path)]) == 0
    assert capsys.readouterr().err == ""


def test_standard_input_is_read(log: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.dup(0)
    try:
        with open(log) as file:
            os.dup2(file.fileno(), 0)
        assert main(["report", "parse-log", "-", "--format", "none"]) == 0
        assert capsys.readouterr().out.splitlines()[1].startswith(" 1\t0.538261\t")
        assert main(["report", "parse-log", "-"]) == 2  # at its end
        assert capsys.readouterr().err.startswith("echelon: standard input is empty; a log of a training has lines")
    finally:
        os.dup2(before, 0)
        os.close(before)
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["report", "parse-log", "-"]) == 2
    assert capsys.readouterr().err == "echelon: standard input is closed; give the path of a log file\n"


def test_a_log_with_speeds_only_has_no_rows_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "log").write_text("Iter[0] Batch [20]\tSpeed: 100.00 samples/sec\n")
    assert main(["report", "parse-log", str(tmp_path / "log")]) == 0
    out, err = capsys.readouterr()
    assert out == "| epoch | time |\n| --- | --- |\n"
    assert err == "echelon: no epoch of the log is complete; --speed total shows more\n"


def test_the_script_sits_where_mxnets_does(
    log: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = Path(__file__).parents[3] / "tools" / "parse_log.py"
    monkeypatch.setattr(sys, "argv", [str(script), log, "--format", "none"])
    with pytest.raises(SystemExit) as exit_info:
        runpy.run_path(str(script), run_name="__main__")
    assert exit_info.value.code == 0
    assert capsys.readouterr().out.startswith("epoch\ttrain-accuracy\tval-accuracy\ttime\n 1\t0.538261\t")
