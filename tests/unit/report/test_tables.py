"""The result tables, compared whole with the text that they must be."""

from __future__ import annotations

import json
from dataclasses import replace
from inspect import signature

import pytest

from echelon.errors import UsageError
from echelon.models import registry
from echelon.report.state.epochs import EpochRow
from echelon.report.tables.choose import make_tables
from echelon.report.tables.published import batch_text
from echelon.report.tables.record import LAYERED, RunRecord, model_name
from echelon.report.tables.table import FORMATS, as_csv, as_json, as_markdown

SINGLE = RunRecord(
    "single",
    "GTX980",
    num_gpus=1,
    model="inception-bn-28-small",
    data="cifar10",
    batch_size=256,
    lr=0.1,
    num_epochs=20,
    epochs=tuple(EpochRow(n, 0.5 + n / 100, 0.4 + n / 100, 71.04, 700.0) for n in range(1, 21)),
    accuracy=0.6,
)
CLUSTER = replace(
    SINGLE,
    name="cluster",
    num_machines=5,
    num_workers=5,
    num_devices=10,
    num_gpus=10,
    batch_size=512,
    lr=0.4,
    store="dist_sync",
    scheme="BSP",
    epochs=(EpochRow(1, 0.799032, 0.763262, 9.0, 5000.0), EpochRow(2, 0.9, None, 7.0, 7000.0)),
    utilisation=0.8,
)
SHARED = replace(
    CLUSTER, name="shared", infrastructure="H200", num_machines=1, num_gpus=1, status="failed: exit status 1"
)
ON_CPU = replace(SINGLE, name="cpu", infrastructure="Xeon", num_gpus=0, epochs=(), samples_per_s=33.2, accuracy=None)


def text(name: str, *records: RunRecord) -> str:
    return as_markdown(make_tables(records, [name]))


def test_epoch_times_in_the_columns_of_2015() -> None:
    assert text("performance", SINGLE, CLUSTER, SHARED, ON_CPU) == (
        "### System performance\n\n"
        "#### inception-bn-28-small on cifar10\n\n"
        "| cluster | # machines | # GPUs | batch size / GPU | kvstore | epoch time (sec) |\n"
        "| --- | --- | --- | --- | --- | --- |\n"
        "| GTX980 | 1 | 1 | 256 | `local` | 71.0 |\n"
        "| - | 5 | 10 | 256 | `dist_sync` | 8.0 |\n"
        "| H200 | 1 (5 workers) | 1 (10 processes) | 256 | `dist_sync` | 8.0 (failed: exit status 1) |"
    )


def test_accuracy_by_epoch_under_its_batch_size_and_learning_rate() -> None:
    assert text("accuracy", SINGLE, CLUSTER, replace(SINGLE, name="second", lr=0.05), SHARED, ON_CPU) == (
        "### Accuracy by epoch\n\n"
        "#### inception-bn-28-small on cifar10, single GTX980\n\n"
        "- `batch_size = 256`, `learning_rate = .1` (run single)\n\n"
        "| epoch | train accuracy | valid accuracy |\n| --- | --- | --- |\n"
        "| 10 | 0.600000 | 0.500000 |\n"
        "| 20 | 0.700000 | 0.600000 |\n\n"
        "- `batch_size = 256`, `learning_rate = .05` (run second)\n\n"
        "| epoch | train accuracy | valid accuracy |\n| --- | --- | --- |\n"
        "| 10 | 0.600000 | 0.500000 |\n"
        "| 20 | 0.700000 | 0.600000 |\n\n"
        "#### inception-bn-28-small on cifar10, 5 workers with 10 GTX980, BSP (`dist_sync`)\n\n"
        "- `batch_size = 512`, `learning_rate = .4` (run cluster)\n\n"
        "| epoch | train accuracy | valid accuracy |\n| --- | --- | --- |\n"
        "| 1 | 0.799032 | 0.763262 |\n"
        "| 2 | 0.900000 |  |\n\n"
        "#### inception-bn-28-small on cifar10, 5 workers with 10 processes on 1 H200, BSP (`dist_sync`)\n\n"
        "- `batch_size = 512`, `learning_rate = .4` (run shared, failed: exit status 1)\n\n"
        "| epoch | train accuracy | valid accuracy |\n| --- | --- | --- |\n"
        "| 1 | 0.799032 | 0.763262 |\n"
        "| 2 | 0.900000 |  |"
    )


def test_throughput_in_the_columns_of_2017() -> None:
    assert text("throughput", SINGLE, CLUSTER, SHARED, ON_CPU) == (
        "### Accuracy and throughput\n\n"
        "| infrastructure | model | batch size | gpus | Accuracy (validation) | Epochs | Training time (s/epoch) "
        "| Throughput (samples/s) |\n"
        "| --- | --- | --- | --- | --- | --- | --- | --- |\n"
        "| GTX980 | inception-bn-28-small | 256x1 (lr=0.1) | 1 | 0.600 | 20 | 71.0 | 700 |\n"
        "| GTX980 | inception-bn-28-small | 256x10=2560 (lr=0.4) | 10 | 0.600 | 20 | 8.0 | 6000 (10-80%) |\n"
        "| H200 | inception-bn-28-small | 256x10=2560 (lr=0.4) | 1 (10 processes) | 0.600 | 20 | 8.0 "
        "| 6000 (1-80%) (failed: exit status 1) |\n"
        "| Xeon | inception-bn-28-small | 256 (lr=0.1) | 0 |  | 20 |  | 33 |"
    )


def scaled(num_devices: int, samples_per_s: float, batch: int, status: str = "") -> RunRecord:
    return RunRecord(
        f"{num_devices}-{samples_per_s}",
        "K80",
        num_workers=num_devices,
        num_devices=num_devices,
        num_gpus=num_devices,
        model="resnet50",
        batch_size=batch,
        store="dist_sync",
        samples_per_s=samples_per_s,
        status=status,
    )


def test_weak_scaling_is_measured_from_the_smallest_number_of_devices() -> None:
    runs = [scaled(2, 150.0, 64), scaled(1, 90.0, 64), scaled(1, 110.0, 64), scaled(4, 250.0, 64), scaled(1, 1.0, 32)]
    assert text("weak", *runs, scaled(8, 500.0, 64, "failed: exit status 1")) == (
        "### Weak scaling\n\n"
        "| infrastructure | model | kvstore | batch size / device | devices | runs | samples/s | speedup | efficiency "
        "|\n"
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |\n"
        "| K80 | resnet50 | `dist_sync` | 64 | 1 | 2 | 100.0 | 1.00 | 100.0% |\n"
        "| K80 | resnet50 | `dist_sync` | 64 | 2 | 1 | 150.0 | 1.50 | 75.0% |\n"
        "| K80 | resnet50 | `dist_sync` | 64 | 4 | 1 | 250.0 | 2.50 | 62.5% |\n"
        "| K80 | resnet50 | `dist_sync` | 64 | 8 | 1 |  |  | (failed: exit status 1) |"
    )


def test_strong_scaling_keeps_the_batch_of_all_devices() -> None:
    assert text("strong", scaled(1, 100.0, 128), scaled(2, 160.0, 64), scaled(2, 500.0, 128)).splitlines()[4:] == [
        "| K80 | resnet50 | `dist_sync` | 128 | 1 | 1 | 100.0 | 1.00 | 100.0% |",
        "| K80 | resnet50 | `dist_sync` | 128 | 2 | 1 | 160.0 | 1.60 | 80.0% |",
    ]


def timed(seed: int, *curve: tuple[float, float], status: str = "") -> RunRecord:
    return RunRecord(
        f"seed-{seed}",
        "EPYC",
        num_workers=4,
        num_devices=4,
        model="cnn",
        data="digits",
        batch_size=16,
        lr=0.02,
        store="dist_ssync",
        variant="staleness 3",
        seed=seed,
        curve=curve,
        status=status,
    )


def test_time_to_accuracy_is_the_median_over_the_seeds_and_a_miss_counts_as_longest() -> None:
    runs = [
        timed(0, (1.0, 0.5), (2.0, 0.91), (3.0, 0.89)),
        timed(1, (1.0, 0.9)),
        timed(2, (9.0, 0.8), status="stopped by SIGINT"),
    ]
    head, _, row = as_markdown(make_tables(runs, ["time-to-accuracy"], target=0.9)).splitlines()[2:]
    assert head.startswith("| infrastructure | model | data | workers | batch size | learning rate | kvstore | runs |")
    assert row == (
        "| EPYC | cnn | digits | 4 | 16 | 0.02 | `dist_ssync staleness 3` | 3 | 2 | 2.0 "
        "| 1.0 – 2.0 (seed-2: stopped by SIGINT) |"
    )
    missed = as_markdown(make_tables(runs[2:], ["time-to-accuracy"], target=0.9)).splitlines()[-1]
    assert missed.endswith("| 1 | 0 | not reached | (seed-2: stopped by SIGINT) |")


def test_the_target_is_the_runs_own_unless_one_is_given() -> None:
    runs = [replace(timed(0, (1.0, 0.9)), target_accuracy=0.9)]
    assert make_tables(runs, ["time-to-accuracy"])[0].title == "Time to a validation accuracy of 0.9"
    for others in ([timed(1, (1.0, 0.9))], [*runs, replace(runs[0], target_accuracy=0.8)]):
        with pytest.raises(UsageError, match="time-to-accuracy needs --target"):
            make_tables(others, ["time-to-accuracy"])
    for wrong in (0.0, 90.0):
        with pytest.raises(UsageError, match="--target must be above 0 and at most 1"):
            make_tables(runs, target=wrong)


def test_the_table_of_a_given_target_comes_first() -> None:
    runs = [replace(timed(0, (1.0, 0.9)), target_accuracy=0.9)]
    assert make_tables(runs)[-1].name == "time-to-accuracy"
    assert make_tables(runs, target=0.8)[0].name == "time-to-accuracy"


def test_without_names_only_tables_with_rows_are_made() -> None:
    assert [table.name for table in make_tables([SINGLE])] == ["performance", "accuracy", "throughput"]
    with pytest.raises(UsageError, match="--table weak: no two runs have the same model"):
        make_tables([SINGLE], ["weak"])
    with pytest.raises(UsageError, match="--every must be 1 or more, not 0"):
        make_tables([SINGLE], every=0)


def test_csv_and_json_hold_values_and_the_status() -> None:
    lines = as_csv(make_tables([SINGLE, SHARED], ["performance"])).splitlines()
    assert (
        lines[0] == "model,data,cluster,# machines,# GPUs,batch size / GPU,kvstore,epoch time (sec),workers,run,status"
    )
    assert lines[2] == "inception-bn-28-small,cifar10,H200,1,1,256,dist_sync,8.0,5,shared,failed: exit status 1"
    body = json.loads(as_json(make_tables([CLUSTER])))
    assert body["throughput"][0]["Throughput (samples/s)"] == 6000
    assert body["throughput"][0]["utilisation"] == 0.8
    assert body["accuracy"][1] | {"status": ""} == {
        "run": "cluster",
        "model": "inception-bn-28-small",
        "kvstore": "dist_sync",
        "batch_size": 512,
        "learning_rate": 0.4,
        "run_status": "ok",
        "epoch": 2,
        "train accuracy": 0.9,
        "valid accuracy": None,
        "status": "",
    }
    assert set(FORMATS) == {"markdown", "csv", "json"}


def test_the_networks_with_layers_are_those_of_the_registry() -> None:
    accept = [name for name in registry.names() if "num_layers" in signature(registry._find_function(name)).parameters]
    assert sorted(LAYERED) == sorted(accept)


def test_a_cell_cannot_break_the_table() -> None:
    named = replace(SINGLE, infrastructure="a|b\nc")
    assert "| a\\|b c | 1 | 1 |" in text("performance", named)


def test_names_and_batches_are_written_as_in_published_tables() -> None:
    assert model_name("resnet", 50) == "resnet50"
    assert model_name("resnet-v1", 50) == "resnet-v1-50"
    assert model_name("mlp", 110) == "mlp"  # it has no such option, but the script has a default
    assert model_name("vgg", 16, "float16") == "vgg16 float16"
    assert (
        batch_text(replace(CLUSTER, num_workers=1, num_devices=8, num_gpus=8, batch_size=1024)) == "128x8=1024 (lr=0.4)"
    )
