"""Where the records of the tables come from: run folders, result files, and logs of `echelon bench run`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.results import Origin, Record
from benchmarks.gpu.rows import gpu_rows
from benchmarks.gpu.run import shown_command
from echelon.cli.main import main
from echelon.errors import DataError
from echelon.report.state.epochs import EpochRow
from echelon.report.state.run import RunState
from echelon.report.tables.folders import find_runs, read_run, record_of
from echelon.report.tables.results import read_results, record_of_command, record_of_experiment

MACHINE = {"cpu": "AMD EPYC", "cores": 2}
SETTINGS: dict[str, Any] = {
    "network": "resnet",
    "num_layers": 50,
    "data": "cifar10",
    "devices": ["cuda:0", "cuda:0"],
    "batch_size": 256,
    "lr": 0.1,
    "kv_store": "dist_ssync",
    "staleness": 3,
    "groups": None,
    "num_epochs": 2,
    "seed": 7,
    "pace": {"seconds": 0.0, "slow": {"1": 3.0}, "stall": [0.1, 5.0], "seed": 0},
}
GPU_ROW: dict[str, Any] = {
    "name": "cluster-dist_ssync-256-0.4",
    "command": "echelon launch -n 5 -s 5 python train_cifar10.py --gpus 0,0 --network resnet --num-layers 50 "
    "--batch-size 256 --lr 0.4 --num-epochs 2 --kv-store dist_ssync --staleness 3",
    "origin": {"gpu": "NVIDIA H200"},
    "jobs": 1,
    "error": "",
    "speeds": [100.0, 300.0, 200.0],
    "train_accuracy": {"0": 0.5, "1": 0.6},
    "validation_accuracy": {"0": 0.4, "1": 0.55},
    "epoch_s": {"0": 9.0, "1": 7.0},
    "curve": [[9.5, 0.4], [17.0, 0.55]],
}
EXPERIMENT: dict[str, Any] = {
    "exp.model": "resnet50",
    "exp.replica_batch": 128,
    "exp.num_replicas": 8,
    "exp.num_gpus": 8,
    "exp.num_nodes": 2,
    "exp.status": "ok",
    "exp.device_title": "V100",
    "mxnet.kv_store": "dist_device_sync",
    "results.throughput": 5000,
    "results.use.gpus": [[80, 90], [90, 100]],
}


def event(kind: str, who: str = "worker 0", at: float = 1000.0, **fields: Any) -> dict[str, Any]:
    return {"event": kind, "at": at, "who": who, **fields}


def events(*, finished: bool = True) -> list[dict[str, Any]]:
    found = [event("job", "launcher 0", num_workers=2, num_servers=1, machine=MACHINE)]
    found.append(event("store", store=0, name="dist_ssync", scheme="SSP", groups=None, staleness=3))
    found.append(event("settings", **SETTINGS))
    for rank in range(2):
        found.append(event("registered", f"worker {rank} (pid {rank + 7} on 127.0.0.1)"))
        begin: dict[str, Any] = {
            "rank": rank,
            "device": "NVIDIA H200",
            "num_devices": 2,
            "batches_per_epoch": 10,
            "num_epochs": 2,
        }
        found.append(event("begin", f"worker {rank}", **begin, first_step=0))
        epoch: dict[str, Any] = {
            "rank": rank,
            "epoch": 1,
            "samples": 2560,
            "seconds": 2.0 + rank,
            "metrics": {"accuracy": 0.5},
        }
        found.append(event("epoch", f"worker {rank}", **epoch))
        clock = 20 if finished else 10
        report = {"rank": rank, "clock": clock, "samples": clock * 256, "wait_s": 0.0, "staleness": {}}
        kind = "done" if finished else "progress"
        found.append(event(kind, f"worker {rank}", at=1004.0, **report, **({"seconds": 4.0} if finished else {})))
    found.append(event("validation", epoch=1.0, accuracy=0.7, loss=1.0, seconds=2.5))
    return found


def state_of(found: list[dict[str, Any]]) -> RunState:
    state = RunState()
    state.take(found)
    return state


def write_run(folder: Path, found: list[dict[str, Any]], summary: dict[str, Any] | None = None) -> Path:
    folder.mkdir(parents=True)
    (folder / "events.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in found))
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def test_a_run_folder_says_what_ran_and_where(tmp_path: Path) -> None:
    record = read_run(write_run(tmp_path / "a-run", events(), {"exit_status": 0, "accuracy": 0.71}))
    assert (record.name, record.infrastructure, record.num_machines) == ("a-run", "NVIDIA H200", 1)
    assert (record.num_workers, record.num_devices, record.num_gpus) == (2, 4, 1)  # four processes on one GPU
    assert (record.model, record.data, record.batch_size, record.batch_per_device) == ("resnet50", "cifar10", 256, 128)
    assert (record.store, record.scheme, record.variant) == ("dist_ssync", "SSP", "staleness 3, slow 1:3, stall 0.1:5")
    assert (record.seed, record.lr, record.num_epochs, record.accuracy) == (7, 0.1, 2, 0.71)
    assert record.epochs == (EpochRow(1, 0.5, 0.7, 2.5, 2560 / 2 + 2560 / 3),)
    assert record.curve == ((2.5, 0.7),)
    assert record.status == ""


def test_several_machines_are_counted_by_their_addresses() -> None:
    found = events()
    found.append(event("registered", "worker 1 (pid 8 on 10.0.0.2)"))
    record = record_of("run", state_of(found), {})
    assert (record.num_machines, record.num_gpus) == (2, 2)


@pytest.mark.parametrize(
    ("finished", "summary", "status"),
    [
        (True, {}, ""),
        (False, {}, "not finished after 1.0 of 2 epochs"),
        (False, {"exit_status": 130}, "stopped by SIGINT after 1.0 of 2 epochs"),
        (False, {"exit_status": 1}, "failed: exit status 1 after 1.0 of 2 epochs"),
        (False, {"exit_status": 137}, "failed: exit status 137, SIGKILL after 1.0 of 2 epochs"),
        (False, {"exit_status": 0}, ""),  # for example because it reached its target
    ],
)
def test_a_run_that_did_not_end_as_planned_is_marked(finished: bool, summary: dict[str, Any], status: str) -> None:
    assert record_of("run", state_of(events(finished=finished)), summary).status == status


def test_a_run_that_lost_a_worker_is_marked() -> None:
    found = events(finished=False)
    found.append(event("view", "scheduler 0", workers=[0], reason="worker 1 died", departure="died", number=2))
    assert record_of("run", state_of(found), {"exit_status": 0}).status == "1 of 2 workers left early"


def test_an_old_folder_without_its_events_shows_its_summary(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    summary = {
        "store": "dist_gsync",
        "accuracy": 0.9,
        "exit_status": 0,
        "samples_per_s": 500.0,
        "settings": {**SETTINGS, "devices": ["cpu"], "pace": None},
        "validations": [{"seconds": 3.0, "epoch": 1.0, "accuracy": 0.9, "loss": 0.1}],
        "workers": [{}, {}, {}],
    }
    (tmp_path / "old" / "summary.json").write_text(json.dumps(summary))
    record = read_run(tmp_path / "old")
    assert (record.store, record.num_workers, record.num_gpus, record.throughput) == ("dist_gsync", 3, 0, 500.0)
    assert (record.infrastructure, record.curve) == ("unknown", ((3.0, 0.9),))


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"exit_status": "0"}, "exit_status: expected `int | null`, got `str`"),
        ({"workers": None}, "workers: expected `array`, got `null`"),
        ({"accuracy": "high"}, "accuracy: expected `float | null`, got `str`"),
        ({"epochs": [{"epoch": None}]}, "epochs[0].epoch: expected `int`, got `null`"),
        ({"epochs": [{"epoch": 1}]}, "epochs[0]: object missing required field `train_accuracy`"),
        ({"validations": [{"seconds": None}]}, "validations[0].seconds: expected `float`, got `null`"),
        ({"settings": {"batch_size": "32"}}, "settings.batch_size: expected `int`, got `str`"),
        ({"settings": {"pace": {"slow": 3}}}, "settings.pace.slow: expected `object | null`, got `int`"),
    ],
)
def test_a_summary_of_wrong_types_names_the_file_and_the_field(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], field: dict[str, Any], message: str
) -> None:
    run = write_run(tmp_path / "run", events(), {"exit_status": 0, "accuracy": 0.71, **field})
    assert main(["report", "tables", str(run)]) == 2
    advice = "the file is damaged, delete it to use only the events"
    assert capsys.readouterr().err == f"echelon: {run}/summary.json: {message}; {advice}\n"


def test_a_summary_may_have_nulls_for_nan_and_fields_of_later_versions(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    points = [{"seconds": 3.0, "accuracy": None}, {"seconds": 4.0, "accuracy": 0.9}]
    row = {"epoch": 1, "train_accuracy": None, "valid_accuracy": 0.9, "seconds": 2.0, "samples_per_s": None, "new": 1}
    summary = {"exit_status": 0, "validations": points, "epochs": [row]}
    (tmp_path / "old" / "summary.json").write_text(json.dumps(summary))
    record = read_run(tmp_path / "old")
    assert (record.curve, record.epoch_s) == (((4.0, 0.9),), 2.0)


def test_runs_below_a_folder_are_found_once(tmp_path: Path) -> None:
    one, two = (write_run(tmp_path / "runs" / name, events()) for name in ("one", "two"))
    (tmp_path / "runs" / "latest").symlink_to("two")
    assert find_runs(tmp_path / "runs") == [one, two]
    assert find_runs(one) == [one]
    assert read_run(tmp_path / "runs" / "latest").name == "two"


def test_an_experiment_of_the_harness_is_found_by_its_log(tmp_path: Path) -> None:
    write_run(tmp_path / "logs" / "2-16.run", events())
    (tmp_path / "logs" / "2-16.log").write_text('__exp.model__="mlp"\n')
    assert find_runs(tmp_path) == [tmp_path / "logs" / "2-16.run"]  # another log, without the status file
    (tmp_path / "logs" / "2-16.status.json").write_text("{}")
    assert find_runs(tmp_path) == [tmp_path / "logs" / "2-16.log"]


def test_a_row_of_the_gpu_benchmark_is_a_record() -> None:
    record = record_of_command(GPU_ROW)
    assert (record.infrastructure, record.num_workers, record.num_devices, record.num_gpus) == ("NVIDIA H200", 5, 10, 1)
    assert (record.model, record.data, record.batch_size, record.lr) == ("resnet50", "cifar10", 256, 0.4)
    assert (record.store, record.scheme, record.variant) == ("dist_ssync", "SSP", "staleness 3")
    assert record.epochs == (EpochRow(1, 0.5, 0.4, 9.0, None), EpochRow(2, 0.6, 0.55, 7.0, None))
    assert (record.accuracy, record.throughput, record.seconds_to(0.5)) == (0.55, 1000.0, 17.0)
    shared = record_of_command(GPU_ROW | {"jobs": 5, "error": "exit status 1"})
    assert (shared.infrastructure, shared.status) == ("NVIDIA H200 (shared by 5 jobs)", "failed: exit status 1")


def test_every_row_of_the_gpu_benchmark_can_be_in_a_table() -> None:
    origin = Origin("abc", "NVIDIA H200", "2.11.0", "made up")
    for row in gpu_rows():
        measured = Record(row.name, row.kind, shown_command(row, ""), "2026-01-01", origin, 1, 2.0)
        record = record_of_command(asdict(measured))
        assert f"--batch-size {record.batch_size} " in f"{measured.command} "
        assert record.model
        assert record.num_workers == (int(row.launch.split()[1]) if row.launch else 1)
        assert (record.num_gpus, record.num_devices % record.num_workers) == (1, 0)
        assert record.target_accuracy == row.to_accuracy


def test_an_experiment_of_dlbs_is_a_record() -> None:
    record = record_of_experiment(EXPERIMENT)
    assert (record.infrastructure, record.model, record.store) == ("V100", "resnet50", "dist_device_sync")
    assert (record.num_machines, record.num_workers, record.num_devices, record.num_gpus) == (2, 2, 8, 8)
    assert (record.batch_size, record.batch_per_device, record.total_batch) == (512, 128, 1024)
    assert (record.throughput, record.utilisation, record.status) == (5000, 0.9, "")
    failed = record_of_experiment(EXPERIMENT | {"exp.status": "failure", "exp.status_msg": "out of memory"})
    assert failed.status == "failure: out of memory"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("{", "cannot be read as results: Input data was truncated"),
        ("[]", "cannot be read as results: Expected `object`"),
        ("{}", "has no rows, runs or data"),
        ('{"rows": [{"command": "x"}]}', "cannot be read as results: the key"),
        ('{"rows": [3]}', "cannot be read as results"),
        ('{"data": [{"exp.replica_batch": "many", "exp.model": "m"}]}', "invalid literal for int"),
    ],
)
def test_other_json_files_are_errors_with_their_name(tmp_path: Path, body: str, message: str) -> None:
    (tmp_path / "results.json").write_text(body)
    with pytest.raises(DataError, match=rf"results\.json {message}|results\.json .*{message}"):
        read_results(tmp_path / "results.json")


def test_the_command_reads_folders_files_and_logs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run", events(), {"exit_status": 0, "accuracy": 0.71})
    (tmp_path / "gpu.json").write_text(json.dumps({"rows": [GPU_ROW]}))
    (tmp_path / "dlbs.json").write_text(json.dumps({"data": [EXPERIMENT]}))
    (tmp_path / "bench.log").write_text(
        "".join(f"__{key}__={json.dumps(value)}\n" for key, value in EXPERIMENT.items())
    )
    paths = [str(tmp_path / name) for name in ("run", "gpu.json", "dlbs.json", "bench.log")]
    assert main(["report", "tables", *paths, str(run), "--table", "throughput", "--cluster", "ours"]) == 0
    rows = capsys.readouterr().out.splitlines()[4:]
    assert [row.split(" | ")[:4] for row in rows] == [
        ["| ours", "resnet50", "128x4=512 (lr=0.1)", "1 (4 processes)"],
        ["| ours", "resnet50", "128x10=1280 (lr=0.4)", "1 (10 processes)"],
        ["| ours", "resnet50", "128x8=1024", "8"],
        ["| ours", "resnet50", "128x8=1024", "8"],
    ]


def test_errors_of_the_command_name_the_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.log").write_text("Epoch[0] Time cost=7.100\n")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "summary.json").write_text("{")
    (tmp_path / "strange").mkdir()
    (tmp_path / "strange" / "events.jsonl").write_text('{"event": "done"}\n')
    (tmp_path / "empty").mkdir()
    for name, message in {
        "absent": "does not exist; give a run folder such as runs/latest",
        "empty": "has no run: neither events.jsonl nor summary.json lies in it or below it",
        "train.log": "is not a log of `echelon bench run`",
        "damaged": "the file is damaged",
        "strange": "contains no event of a run",
    }.items():
        assert main(["report", "tables", str(tmp_path / name)]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith(f"echelon: {tmp_path}/{name}")
        assert message in err
        assert err.count("\n") == 1
    run = write_run(tmp_path / "run", events(), {"exit_status": 0, "accuracy": 0.71})
    assert main(["report", "tables", str(run), "--format", "csv"]) == 2
    assert "--format csv writes one table; choose it with --table" in capsys.readouterr().err
