"""Records of other results: files of `benchmarks/results/`, and experiments of `echelon bench run` and of DLBS."""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from echelon.errors import DataError
from echelon.report.state.epochs import EpochRow
from echelon.report.tables.record import RunRecord, model_name
from echelon.schemes.stores import store_kind

_FLAGS = {  # of the training scripts: other names, and values if a command does not have them
    "--gpus": (("--gpu",), ""),
    "--network": ((), ""),
    "--num-layers": ((), None),
    "--batch-size": ((), "128"),
    "--lr": ((), None),
    "--kv-store": ((), "device"),
    "--num-epochs": ((), "0"),
    "--dtype": ((), None),
    "--benchmark": ((), "0"),
    "--staleness": ((), None),
    "--groups": ((), None),
    "--slow": ((), None),
    "--seed": ((), None),
    "--target-accuracy": ((), None),
    "-n": (("--num-workers",), "1"),
}
_SCRIPTS = {  # the data and the default learning rate of the training scripts
    "train_cifar10.py": ("cifar10", 0.05),
    "train_mnist.py": ("mnist", 0.05),
    "train_imagenet.py": ("imagenet", 0.1),
}


def read_results(path: Path) -> list[RunRecord]:
    """Return the records of a JSON file: of `benchmarks.gpu`, `bench schemes`, or in the form of DLBS."""
    try:
        body = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        if "data" in body:
            return [record_of_experiment(one) for one in body["data"]]
        if "rows" in body:
            return [record_of_command(one) for one in body["rows"]]
        if "runs" in body:
            return [_record_of_scheme(one, body) for one in body["runs"]]
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error
    except (msgspec.DecodeError, KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise DataError(f"{path} cannot be read as results: {_reason(error)}") from error
    raise DataError(
        f"{path} has no rows, runs or data; give a run folder, a log or a result of `echelon bench run`, a file "
        "gpu*.json or schemes.json"
    )


def _reason(error: Exception) -> str:
    return f"the key {error} is missing" if isinstance(error, KeyError) else str(error)


def record_of_command(row: Mapping[str, Any]) -> RunRecord:
    """Return the record of a row of `benchmarks.gpu`: a command, its figures by epoch (from 0), and its error."""
    flags = _flags(shlex.split(row["command"]))
    devices = [word for word in (flags["--gpus"] or "").split(",") if word]
    num_workers = int(flags["-n"] or 1)
    data, lr = next((known for script, known in _SCRIPTS.items() if script in row["command"]), ("", None))
    num_layers = int(flags["--num-layers"]) if flags["--num-layers"] else None
    train, valid, seconds = ({int(key): value for key, value in row[name].items()} for name in _BY_EPOCH)
    store = flags["--kv-store"] or ""
    others = f" (shared by {row['jobs']} jobs)" if row.get("jobs", 1) > 1 else ""
    return RunRecord(
        name=row["name"],
        infrastructure=f"{row['origin']['gpu']}{others}",
        num_workers=num_workers,
        num_devices=num_workers * max(1, len(devices)),
        num_gpus=len(set(devices)),
        model=model_name(flags["--network"] or "", num_layers, flags["--dtype"]),
        data="synthetic" if flags["--benchmark"] == "1" else data,
        batch_size=int(flags["--batch-size"] or 0),
        lr=float(flags["--lr"]) if flags["--lr"] else lr,
        store=store,
        scheme=store_kind(store).scheme if num_workers > 1 else "",
        variant=", ".join(f"{name[2:]} {flags[name]}" for name in _VARIANTS if flags[name] is not None),
        seed=int(flags["--seed"]) if flags["--seed"] else None,
        num_epochs=int(flags["--num-epochs"] or 0),
        epochs=tuple(
            EpochRow(epoch + 1, train.get(epoch), valid.get(epoch), seconds.get(epoch), None)
            for epoch in sorted({*train, *valid, *seconds})
        ),
        curve=tuple((seconds, accuracy) for seconds, accuracy in row.get("curve", ())),
        accuracy=valid[max(valid)] if valid else None,
        samples_per_s=statistics.median(row["speeds"]) * num_workers if row["speeds"] else None,
        utilisation=row.get("utilisation"),
        target_accuracy=float(flags["--target-accuracy"]) if flags["--target-accuracy"] else None,
        status=f"failed: {row['error']}" if row.get("error") else "",
    )


_BY_EPOCH = ("train_accuracy", "validation_accuracy", "epoch_s")
_VARIANTS = ("--staleness", "--groups", "--slow")


def _flags(words: Sequence[str]) -> dict[str, str | None]:
    """Return the values of the flags of a command; the last one counts."""
    values: dict[str, str | None] = {name: default for name, (_, default) in _FLAGS.items()}
    names = {other: name for name, (others, _) in _FLAGS.items() for other in (name, *others)}
    for index, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if flag in names:
            values[names[flag]] = value if equals else words[index + 1]
    return values


def _record_of_scheme(run: Mapping[str, Any], body: Mapping[str, Any]) -> RunRecord:
    """Return the record of a run of `echelon bench schemes`."""
    settings = body["settings"]
    return RunRecord(
        name=f"{run['case']}-{run['store']}-{run['seed']}",
        infrastructure=f"{body['machine']['cpu']} ({body['machine']['cores']} cores)",
        num_workers=settings.get("num_workers", 4),
        num_devices=settings.get("num_workers", 4),
        model="digits-cnn",
        data="digits",
        batch_size=settings["batch_size"],
        lr=run.get("lr", settings["lr"]),
        store=run["store"],
        variant=run["case"],
        seed=run["seed"],
        curve=tuple((seconds, accuracy) for seconds, accuracy in run["curve"]),
        samples_per_s=run.get("samples_per_s"),
        target_accuracy=settings["target"],
        status=f"failed: {run['error']}" if run.get("error") else "",
    )


def record_of_experiment(values: Mapping[str, Any]) -> RunRecord:
    """Return the record of an experiment by DLBS's keys, from its log or from a file of results."""
    status, message = values.get("exp.status", "ok"), values.get("exp.status_msg") or ""
    throughput = values.get("results.throughput")
    num_replicas = int(values.get("exp.num_replicas") or values.get("exp.num_gpus") or 1)
    num_workers = int(values.get("exp.num_nodes") or 1) * int(values.get("echelon.num_workers") or 1)
    effective = int(values.get("exp.effective_batch") or int(values["exp.replica_batch"]) * num_replicas)
    variant = [
        f"{name} {value}" for name in ("staleness", "groups", "slow") if (value := values.get(f"echelon.{name}"))
    ]
    return RunRecord(
        name=str(values.get("exp.id") or values.get("exp.log_file") or values["exp.model"]),
        infrastructure=str(values.get("exp.device_title") or values.get("exp.node_title") or _hardware(values)),
        num_machines=int(values.get("exp.num_nodes") or 1),
        num_workers=num_workers,
        num_devices=num_replicas,
        num_gpus=int(values.get("exp.num_gpus") or 0),
        model=str(values.get("exp.model_title") or values["exp.model"]),
        data=str(values.get("exp.data") or ""),
        batch_size=effective // num_workers,
        lr=values.get("echelon.lr"),
        store=str(values.get("mxnet.kv_store") or ""),
        variant=", ".join(variant),
        samples_per_s=float(throughput) if throughput else None,
        utilisation=_utilisation(values.get("results.use.gpus")),
        status="" if status == "ok" and throughput else f"{status}: {message}".removesuffix(": "),
    )


def _hardware(values: Mapping[str, Any]) -> str:
    if "hw.cpu" in values and not values.get("exp.num_gpus"):
        return f"{values['hw.cpu']} ({values.get('hw.cores')} cores)"
    return str(values.get("exp.device_type") or "unknown")


def _utilisation(series: Any) -> float | None:
    """Return the mean utilisation of the GPUs, from 0 to 1; samples are lists with one percentage per GPU."""
    numbers = [float(value) for sample in series or () for value in (sample if isinstance(sample, list) else [sample])]
    return statistics.fmean(numbers) / 100 if numbers else None
