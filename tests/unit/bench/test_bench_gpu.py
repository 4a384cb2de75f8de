"""`python -m benchmarks.gpu`: its rows, the figures it reads from logs, and its records."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.gpu.log import Log, read_curve, read_log, speed_of
from benchmarks.gpu.published import TABLE_2017, best_cells, fastest_single, inception_runs
from benchmarks.gpu.results import Origin, Record, better, missing_figures, read_folder, read_records
from benchmarks.gpu.results import write_records as write
from benchmarks.gpu.rows import Bar, Row, choose, gpu_rows, tiny_rows
from benchmarks.gpu.run import shown_command
from echelon.errors import DataError, UsageError
from echelon.train import log_lines

LOG = """\
INFO:root:start with arguments Namespace(network='resnet', num_layers=50)
INFO:root:engine compiled, then captured: as --engine says
INFO:root:precision bfloat16: this GPU's matrix units are several times faster with it
INFO:root:compiling the step …
INFO:root:still compiling the step, 20 s
INFO:root:Epoch[0] Batch [0-20]\tSpeed: 12.50 samples/sec\taccuracy=0.100000
INFO:root:compiling the step took 51 s
INFO:root:Epoch[0] Batch [20-40]\tSpeed: 37000.12 samples/sec\taccuracy=0.500000
INFO:root:Epoch[0] Batch [40-60]\tSpeed: inf samples/sec\taccuracy=0.500000
INFO:root:Epoch[0] Train-accuracy=0.412300
INFO:root:Epoch[0] Train-cross-entropy=1.500000
INFO:root:Epoch[0] Time cost=52.300
INFO:root:Epoch[0] Validation-accuracy=0.510000
[worker 0] INFO:root:Epoch[1] Batch [0-20]\tSpeed: 36000.00 samples/sec\taccuracy=0.600000
[worker 0] INFO:root:Epoch[1] Train-accuracy=0.700000
[worker 0] INFO:root:Epoch[1] Time cost=1.301
[worker 0] INFO:root:Epoch[1] Validation-accuracy=0.680000
"""
ORIGIN = Origin("0123456789abcdef", "a GPU", "2.11.0", "made up")


def record(name: str = "row", date: str = "2026-01-01", error: str = "") -> Record:
    return Record(name, "accuracy", "python x.py", date, ORIGIN, 1, 2.0, error, validation_accuracy={0: 0.5, 1: 0.4})


def test_a_log_is_read_with_any_prefix_and_without_speeds_during_compilation() -> None:
    log = read_log(LOG)
    assert log.speeds == [37000.12, 36000.0]  # without the line before the end of compiling and the infinite one
    assert log.train == {0: 0.4123, 1: 0.7}
    assert log.validation == {0: 0.51, 1: 0.68}
    assert log.epoch_s == {0: 52.3, 1: 1.301}
    assert log.compile_s == 51
    assert log.engine == "engine compiled, then captured: as --engine says"
    assert log.precision.startswith("precision bfloat16: ")


def test_figures_of_an_epoch_are_means_over_the_workers() -> None:
    lines = [f"[worker {rank}] INFO:root:Epoch[0] Train-accuracy=0.{rank + 4}" for rank in (0, 2)]
    lines += ["[worker 0] INFO:root:Epoch[0] Time cost=1.5", "[worker 2] INFO:root:Epoch[0] Time cost=2.5"]
    log = read_log("\n".join(lines))
    assert (log.train, log.epoch_s) == ({0: 0.5}, {0: 2.0})


def test_a_curve_has_the_finished_validations_of_the_events(tmp_path: Path) -> None:
    assert read_curve(tmp_path) == []
    events = [
        {"event": "validation", "epoch": 0.5, "done": 500, "total": 10000},
        {"event": "validation", "epoch": 0.5, "accuracy": 0.5, "loss": 1.0, "seconds": 12.5},
        {"event": "final", "epoch": 1, "accuracy": 0.9},
    ]
    (tmp_path / "events.jsonl").write_text("".join(f"{json.dumps({'at': 0, 'who': 'w', **e})}\n" for e in events))
    assert read_curve(tmp_path) == [(12.5, 0.5)]
    row = Row("r", "schemes", "x.py", "", to_accuracy=0.6)
    wrong = "the accuracy 0.6 was not reached; the best of 1 validations is 0.5000"
    assert missing_figures(row, Log(), read_curve(tmp_path)) == wrong
    assert missing_figures(row, Log(), [(1.0, 0.6)]) == ""


def test_the_lines_that_trainers_write_can_be_read() -> None:
    lines = [
        log_lines.speed_line(0, 0, 20, 1234.5, {"accuracy": 0.25}),
        log_lines.train_line(0, "accuracy", 0.25),
        log_lines.time_line(0, 3.5),
        log_lines.validation_line(0, "accuracy", 0.125),
    ]
    assert read_log("\n".join(lines)) == Log([1234.5], {0: 0.25}, {0: 0.125}, {0: 3.5})


def test_the_speed_is_a_median_with_its_spread() -> None:
    speed = speed_of([float(value) for value in range(11)])
    assert speed is not None
    assert (speed.median, speed.p10, speed.p90, speed.lines) == (5, 1, 9, 11)
    assert speed_of([]) is None


def test_the_accuracies_to_reach_are_the_best_published_ones() -> None:
    bars = {(cell.layers, cell.batch, cell.lr): cell.accuracy for cell in best_cells()}
    assert len(bars) == 16
    assert bars[50, 256, 0.05] == 0.782  # the best of 0.768, 0.700 and 0.782
    assert bars[50, 512, 0.05] == 0.703
    assert bars[50, 4096, 0.4] == 0.611
    assert bars[110, 128, 0.05] == 0.818
    assert all(cell.accuracy <= bars[cell.layers, cell.batch, cell.lr] for cell in TABLE_2017)
    assert fastest_single(50, 128) == next(c for c in TABLE_2017 if c.samples_per_s == 2900)
    assert fastest_single(110, 512) is None


def test_one_inception_run_covers_all_published_epochs() -> None:
    rows = {row.name: row for row in gpu_rows()}
    assert [bar.epochs for bar in rows["inception-128-0.1"].bars] == [10, 20, 30, 40]
    assert rows["inception-128-0.1"].arguments.endswith("--num-epochs 40")
    assert rows["inception-256-0.1"].arguments.endswith("--num-epochs 20")
    assert sum(map(len, inception_runs().values())) == 6


def test_rows_have_different_names_and_compare_with_existing_rows() -> None:
    for rows in (gpu_rows(), tiny_rows()):
        names = [row.name for row in rows]
        assert len(set(names)) == len(names)
        assert {row.against for row in rows if row.against} <= set(names)


def test_commands_are_what_a_user_types() -> None:
    rows = {row.name: row for row in gpu_rows()}
    assert shown_command(rows["store-dist-sync-512"], "--wd 0.0001", "secret/place") == (
        "echelon launch -n 1 -s 1 python train_cifar10.py --gpus 0 --network resnet --num-layers 50 --batch-size 512 "
        "--num-epochs 3 --engine compile --kv-store dist_sync --data-dir DIR --wd 0.0001"
    )
    assert "--data-dir" not in shown_command(rows["imagenet-resnet50-128"], "", "secret/place")  # reads no data
    assert "--num-examples 153600" in rows["imagenet-resnet50-128"].arguments


def test_rows_are_chosen_by_kind_and_name() -> None:
    rows = gpu_rows()
    assert choose(rows, []) == rows
    assert {row.kind for row in choose(rows, ["speed"])} == {"speed"}
    assert [row.name for row in choose(rows, ["resnet50-128-0.05", "store-local-512"])] == [
        "store-local-512",
        "resnet50-128-0.05",
    ]
    with pytest.raises(UsageError, match=r"'resnet50-128-0.5'.*did you mean 'resnet50-128-0.05'"):
        choose(rows, ["resnet50-128-0.5"])


def test_a_log_without_the_figures_of_its_row_is_an_error() -> None:
    speed = Row("s", "speed", "x.py", "")
    accuracy = Row("a", "accuracy", "x.py", "", bars=(Bar(2, 0.5, "K80"), Bar(3, 0.5, "K80")))
    assert missing_figures(speed, read_log(LOG)) == ""
    assert missing_figures(speed, Log()) == "the log has no speed line"
    assert missing_figures(accuracy, read_log(LOG)) == "the log has no validation after epoch 3"


def test_records_are_read_back_as_written(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    assert read_records(path) == {}
    write(path, [record("one"), record("two", error="exit status 1")], "python -m benchmarks.gpu")
    assert read_records(path) == {"one": record("one"), "two": record("two", error="exit status 1")}
    assert {"command", "commit", "machine", "date", "rows"} == set(json.loads(path.read_text()))


def test_another_json_file_is_rejected_with_its_name(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    path.write_text('{"rows": [{"name": 3}]}')
    with pytest.raises(DataError, match=r"gpu\.json is not a result of `python -m benchmarks.gpu`"):
        read_records(path)


def test_a_record_with_figures_replaces_a_failure_and_a_newer_one_an_older_one(tmp_path: Path) -> None:
    old, new = record(date="2026-01-01"), record(date="2026-01-02")
    failed = record(date="2026-01-03", error="exit status 1")
    assert better(None, failed) == failed
    assert better(old, failed) == old
    assert better(failed, old) == old
    assert better(old, new) == better(new, old) == new
    write(tmp_path / "gpu-1.json", [new], "")
    write(tmp_path / "gpu-2.json", [old, record("other")], "")
    write(tmp_path / "io.json", [record("of another benchmark")], "")
    assert read_folder(tmp_path) == {"row": new, "other": record("other")}
