"""Log lines of every version of MXNet and of Echelon: what a line says, and the figures of whole logs."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from echelon.errors import DataError, UsageError
from echelon.report.logs.epochs import Training, read_logs
from echelon.report.logs.lines import EpochFigure, Figure, SpeedFigure, figures_of
from echelon.train import log_lines

DATED = "2016-05-26 10:11:12,345 Node[3] "


def of(line: str) -> list[Figure]:
    return list(figures_of(line))


@pytest.mark.parametrize(
    ("line", "figure"),
    [
        ("INFO:root:Epoch[0] Train-accuracy=0.538261", EpochFigure("train", 0, "accuracy", 0.538261)),
        ("INFO:root:Epoch[12] Time cost=70.614", EpochFigure("time", 12, "", 70.614)),
        ("INFO:root:Epoch[0] Validation-accuracy=0.666992", EpochFigure("validation", 0, "accuracy", 0.666992)),
        (
            "Epoch[1] Validation-top_k_accuracy_5=0.900000",
            EpochFigure("validation", 1, "top_k_accuracy_5", 0.9),
        ),
        ("Epoch[1] Train-my metric=-1.500000", EpochFigure("train", 1, "my metric", -1.5)),
        ("Epoch[1] Train-accuracy=0.5\r", EpochFigure("train", 1, "accuracy", 0.5)),
        (f"{DATED}Epoch[2] Time cost=7.100", EpochFigure("time", 2, "", 7.1, worker=3)),
        ("[worker 11] INFO:root:Epoch[2] Time cost=7.100", EpochFigure("time", 2, "", 7.1, worker=11)),
        ("[1,0]<stderr>:INFO:root:Epoch[2] Time cost=7.100", EpochFigure("time", 2, "", 7.1, worker=0)),
        (" 4: INFO:root:Epoch[2] Time cost=7.100", EpochFigure("time", 2, "", 7.1, worker=4)),
        (
            "Epoch[0] Batch [40] Validation-accuracy=0.250000",
            EpochFigure("validation", 0, "accuracy", 0.25, batch=40),
        ),
        ("Iter[0] Batch[7] Train-accuracy=0.250000", EpochFigure("train", 0, "accuracy", 0.25, batch=7)),
    ],
)
def test_a_line_of_an_epoch(line: str, figure: EpochFigure) -> None:
    assert of(line) == [figure]


@pytest.mark.parametrize(
    ("line", "figure"),
    [
        (  # up to 0.9.5
            f"{DATED}Epoch[0] Batch [50]\tSpeed: 421.50 samples/sec\tTrain-accuracy=0.125000",
            SpeedFigure(0, None, 50, 421.5, (("accuracy", 0.125),), 3, is_per_metric=True),
        ),
        (  # 0.10 to 1.3
            "INFO:root:Epoch[1] Batch [20]\tSpeed: 1910.41 samples/sec\taccuracy=0.500000\tcross-entropy=1.250000",
            SpeedFigure(1, None, 20, 1910.41, (("accuracy", 0.5), ("cross-entropy", 1.25))),
        ),
        (  # since 1.4
            "INFO:root:Epoch[1] Batch [0-20]\tSpeed: 1910.41 samples/sec\taccuracy=nan",
            SpeedFigure(1, 0, 20, 1910.41, (("accuracy", math.nan),)),
        ),
        ("INFO:root:Iter[0] Batch [20]\tSpeed: inf samples/sec", SpeedFigure(0, None, 20, math.inf)),
        (  # no table shows the metrics of a speed line, so one that cannot be read is not an error
            "Epoch[1] Batch [0-20]\tSpeed: 2.00 samples/sec\tlr=auto\taccuracy=0.500000",
            SpeedFigure(1, 0, 20, 2.0, (("accuracy", 0.5),)),
        ),
        (  # tabs that a terminal has replaced
            "Epoch[1] Batch [0-20]   Speed: 2.00 samples/sec   accuracy=0.5   top-1=0.25",
            SpeedFigure(1, 0, 20, 2.0, (("accuracy", 0.5), ("top-1", 0.25))),
        ),
    ],
)
def test_a_speed_line_of_each_version(line: str, figure: SpeedFigure) -> None:
    assert repr(of(line)) == repr([figure])  # repr, because nan is not equal to itself


@pytest.mark.parametrize(
    "line",
    [
        "",
        "INFO:root:start with arguments Namespace(num_epochs=10)",
        "Epoch[0] Resetting Data Iterator",
        'Saved checkpoint to "model-0001.params"',
        "Batch [5]\tSpeed: 10.00 samples/sec",  # --test-io, which does not train
        "Epoch[x] Train-accuracy=0.5",
        "Epoch[0] Batch [0-20]\tSpeed: 19",  # a line that is not complete
    ],
)
def test_other_lines_say_nothing(line: str) -> None:
    assert of(line) == []


@pytest.mark.parametrize(
    "line",
    [
        "Epoch[0] Train-accuracy=0.500000\x1b[0m",
        "\x1b[1;32mEpoch[0]\x1b[0m \x1b[1mTrain-accuracy=\x1b[31m0.500000\x1b[39;49m",
    ],
)
def test_colours_of_a_terminal_are_ignored(line: str) -> None:
    assert of(line) == [EpochFigure("train", 0, "accuracy", 0.5)]


def test_lines_of_two_processes_that_ran_together_are_both_read() -> None:
    torn = "INFO:root:Epoch[0] Train-accuINFO:root:Epoch[0] Train-accuracy=0.500000INFO:root:Epoch[0] Time cost=7.100"
    assert of(torn) == [EpochFigure("train", 0, "accuracy", 0.5), EpochFigure("time", 0, "", 7.1)]


@pytest.mark.parametrize("value", ["", "abc", "0.5.3", "0,5", "--1", "0.6669922016-05-26"])
def test_a_bad_number_is_an_error(value: str) -> None:
    with pytest.raises(DataError, match=rf"Train-accuracy of epoch 3 is '{value}', which is not a number"):
        of(f"Epoch[3] Train-accuracy={value}")


def write(path: Path, *lines: str, end: str = "\n") -> str:
    path.write_text("\n".join(lines) + end)
    return str(path)


def workers_of(text: str) -> Training:
    training = Training()
    for line in text.splitlines():
        for figure in of(line):
            training.add(figure)
    return training


def test_figures_are_means_over_the_workers_and_speeds_are_sums(tmp_path: Path) -> None:
    paths = [
        write(
            tmp_path / f"rank_{rank}.log",
            log_lines.speed_line(0, 0, 20, 100.0 * (rank + 1), {}),
            log_lines.speed_line(0, 20, 40, 100.0 * (rank + 1), {}),
            log_lines.train_line(0, "accuracy", 0.25 * rank),
            log_lines.time_line(0, 2.0 + rank),
        )
        for rank in range(3)
    ]
    epoch = read_logs(paths).epochs[0]
    assert epoch.mean("train", "accuracy") == 0.25
    assert epoch.mean("time") == 3.0
    assert epoch.mean("validation", "accuracy") is None
    assert [epoch.worker_speed(f"worker {rank}") for rank in range(3)] == [100, 200, 300]
    assert epoch.speed() == 600


def test_the_speed_of_a_worker_is_its_samples_divided_by_its_time() -> None:
    training = workers_of("[worker 0] Epoch[0] Batch [0-20]\tSpeed: 100.00 samples/sec\n" * 1)
    training.add(SpeedFigure(0, 20, 40, 300.0, worker=0))
    training.add(SpeedFigure(0, 40, 60, math.inf, worker=0))  # a clock that did not advance is not a measurement
    training.add(SpeedFigure(0, 60, 80, -5.0, worker=0))  # nor is one that went back
    assert training.epochs[0].worker_speed("worker 0") == pytest.approx(150)


def test_workers_without_a_name_are_counted_by_their_lines_for_the_same_batches() -> None:
    lines = [
        f"INFO:root:Epoch[0] Batch [{last}]\tSpeed: {speed:.2f} samples/sec\taccuracy=0.500000"
        for last, speed in ((20, 100), (20, 100), (40, 100), (20, 100), (40, 100))
    ]
    epoch = workers_of("\n".join(lines)).epochs[0]
    assert (epoch.worker_speed(""), epoch.speed()) == (100, 300)


def test_a_line_that_old_versions_repeat_for_every_metric_counts_once() -> None:
    lines = [
        f"{node} Epoch[0] Batch [50]\tSpeed: 100.00 samples/sec\tTrain-{metric}=0.500000"
        for node in ("a", "b")
        for metric in ("accuracy", "top_k_accuracy_5")
    ]
    assert workers_of("\n".join(lines)).epochs[0].speed() == 200


def test_values_that_are_not_finite_are_left_out_of_the_mean_and_reported(tmp_path: Path) -> None:
    log = write(
        tmp_path / "log",
        "Epoch[0] Train-accuracy=nan",
        "Epoch[0] Train-accuracy=0.500000",
        "Epoch[1] Train-accuracy=nan",
    )
    training = read_logs([log])
    assert training.epochs[0].mean("train", "accuracy") == 0.5
    assert math.isnan(training.epochs[1].mean("train", "accuracy") or 0.0)
    assert training.notes == ["epoch 1: 1 of 2 values of train-accuracy are nan or inf and are not in its mean"]


@pytest.mark.parametrize(
    "cut", ["Epoch[1] Train-accuracy=0.5", "Epoch[1] Train-accuracy=0.", "Epoch[1] Train-accuracy="]
)
def test_a_number_that_was_cut_off_at_the_end_of_the_file_is_left_out(tmp_path: Path, cut: str) -> None:
    training = read_logs([write(tmp_path / "log", "Epoch[0] Train-accuracy=0.500000", cut, end="")])
    assert list(training.epochs) == [0]
    assert training.notes == [f"{tmp_path}/log:2: the last line is not complete and is left out"]


def test_a_complete_last_line_without_a_line_end_counts(tmp_path: Path) -> None:
    training = read_logs([write(tmp_path / "log", "Epoch[0] Time cost=7.1", "Epoch[1] Time cost=7.2", end="")])
    assert training.epochs[1].mean("time") == 7.2
    assert not training.notes


def test_a_metric_is_chosen_by_its_name_or_the_beginning_of_it() -> None:
    training = workers_of(
        "\n".join(f"Epoch[0] Train-{name}=0.5" for name in ("accuracy", "accuracy-2", "top_k_accuracy_5"))
    )
    assert training.choose([]) == {name: name for name in ("accuracy", "accuracy-2", "top_k_accuracy_5")}
    assert training.choose(["accuracy", "top_k"]) == {"accuracy": "accuracy", "top_k": "top_k_accuracy_5"}
    with pytest.raises(UsageError, match="acc is the beginning of accuracy and accuracy-2; give a whole name"):
        training.choose(["acc"])
    with pytest.raises(UsageError, match="unknown metric 'acuracy'; did you mean 'accuracy'"):
        training.choose(["acuracy"])


def test_the_error_about_a_bad_number_names_the_file_and_the_line(tmp_path: Path) -> None:
    log = write(tmp_path / "log", "a line", "Epoch[0] Train-accuracy=0.5.5", "Epoch[0] Time cost=7.1")
    with pytest.raises(DataError, match=r"log:2: Train-accuracy of epoch 0 is '0.5.5', which is not a number"):
        read_logs([log])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (
            b"\x1f\x8b\x08\x00rest",
            r"is compressed by gzip; decompress it first: zcat .*log \| echelon report parse-log -",
        ),
        (b"BZh91AY&SY", "is compressed by bzip2"),
        (b"\xfd7zXZ\x00\x00", "is compressed by xz"),
        (b"(\xb5/\xfd..", "is compressed by zstd"),
        (b"\x7fELF\x02\x00\x00", "is not text: byte 5 is 0"),
        (b"hello\n", "has no line of an epoch, such as: Epoch"),
        (b"\xe9\xff\xfe\n", "has no line of an epoch"),
    ],
)
def test_a_file_that_is_not_a_log(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "log").write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_logs([str(tmp_path / "log")])


def test_a_path_that_is_not_a_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"absent\.log: No such file or directory; give the path of a log file"):
        read_logs([str(tmp_path / "absent.log")])
    with pytest.raises(DataError, match="is a folder, not a log file; give the log files in it"):
        read_logs([str(tmp_path)])
    (tmp_path / "events.jsonl").touch()
    with pytest.raises(DataError, match=r"is a folder, not a log file; echelon report tables .* shows a run folder"):
        read_logs([str(tmp_path)])


def test_a_log_that_is_given_twice_is_an_error(tmp_path: Path) -> None:
    log = write(tmp_path / "log", "Epoch[0] Time cost=7.1")
    with pytest.raises(UsageError, match="is given twice"):
        read_logs([log, log])


def test_bytes_that_are_not_utf_8_and_utf_16_are_read(tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes("température\nEpoch[0] Time cost=7.100\n".encode("latin-1"))
    (tmp_path / "windows").write_bytes("Epoch[0] Time cost=9.100\r\n".encode("utf-16"))
    assert read_logs([str(tmp_path / "latin"), str(tmp_path / "windows")]).epochs[0].mean("time") == pytest.approx(8.1)
