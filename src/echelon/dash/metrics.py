"""`/metrics`: the snapshot of a run in Prometheus' text format, with the names that its conventions ask for.

Names have the prefix `echelon_`, base units (seconds, bytes, ratios from 0 to 1), and `_total` at the end of counters.
Rates are left to the query: `rate(echelon_worker_samples_total[1m])`.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Iterator, Mapping
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from echelon import __version__
from echelon.dash.snapshot import Server, Snapshot, Worker

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
BUCKETS = (0, 1, 2, 4, 8, 16, 32, 64)  # updates or rounds
GAUGE, COUNTER, HISTOGRAM = "gauge", "counter", "histogram"

Of = TypeVar("Of", Snapshot, Worker, Server)
Sample: TypeAlias = tuple[str, Mapping[str, object], float | None]  # suffix of the name, labels, value
Samples: TypeAlias = list[Sample]


class Metric(NamedTuple, Generic[Of]):
    """A metric, and its samples for a run, a worker or a server. Samples whose value is None are left out."""

    name: str
    kind: str
    help: str
    samples: Callable[[Of], Samples]


def _one(value: float | None, **labels: object) -> Samples:
    return [("", labels, value)]


def _by(label: str, values: Mapping[str, float], *names: str) -> Samples:
    """Return one sample per entry, or per entry that is named."""
    return [("", {label: name}, values.get(name)) for name in names or values]


def _histogram(steps: Mapping[str, int]) -> Samples:
    """Return the cumulative buckets, the sum and the count of a histogram; nothing for an empty one."""
    if not steps:
        return []
    values = {int(value): count for value, count in steps.items()}
    total = sum(values.values())
    buckets = {bound: sum(count for value, count in values.items() if value <= bound) for bound in BUCKETS}
    return [
        *(("_bucket", {"le": bound}, count) for bound, count in buckets.items()),
        ("_bucket", {"le": "+Inf"}, total),
        ("_sum", {}, sum(value * count for value, count in values.items())),
        ("_count", {}, total),
    ]


RUN: tuple[Metric[Snapshot], ...] = (
    Metric(
        "echelon_build_info",
        GAUGE,
        "The version of Echelon that serves this page.",
        lambda _: _one(1, version=__version__, python=platform.python_version()),
    ),
    Metric(
        "echelon_run_info", GAUGE, "The run, and what it does.", lambda s: _one(1, run=s.run.name, status=s.run.status)
    ),
    Metric(
        "echelon_run_progress_ratio",
        GAUGE,
        "The part of its steps that the slowest worker has done.",
        lambda s: _one(s.run.fraction),
    ),
    Metric(
        "echelon_run_elapsed_seconds", GAUGE, "The time since the first worker began.", lambda s: _one(s.run.seconds)
    ),
    Metric(
        "echelon_run_remaining_seconds",
        GAUGE,
        "The expected time until the slowest worker has finished.",
        lambda s: _one(s.run.seconds_left),
    ),
    Metric(
        "echelon_validation_accuracy_ratio",
        GAUGE,
        "The accuracy of the latest validation.",
        lambda s: _one(_last(s.validation.accuracy)),
    ),
    Metric(
        "echelon_validation_loss",
        GAUGE,
        "The loss of the latest validation.",
        lambda s: _one(_last(s.validation.loss)),
    ),
    Metric("echelon_faults_total", COUNTER, "Faults and rejoins by kind.", lambda s: _by("kind", s.fault_counts)),
    Metric(
        "echelon_unreadable_events_total",
        COUNTER,
        "Lines of events.jsonl that could not be read.",
        lambda s: _one(s.run.unreadable_lines),
    ),
)

WORKER: tuple[Metric[Worker], ...] = (
    Metric("echelon_worker_state", GAUGE, "1 for the state of a worker.", lambda w: _one(1, state=w.state)),
    Metric("echelon_worker_steps_total", COUNTER, "Steps of a worker.", lambda w: _one(w.clock)),
    Metric("echelon_worker_samples_total", COUNTER, "Training samples of a worker.", lambda w: _one(w.samples)),
    Metric("echelon_worker_epochs", GAUGE, "Epochs of a worker, with a fraction.", lambda w: _one(w.epochs_done)),
    Metric(
        "echelon_worker_phase_seconds_total",
        COUNTER,
        "The time of a worker by phase of its steps: compute, push, wait, pull.",
        lambda w: _by("phase", w.seconds),
    ),
    Metric(
        "echelon_worker_tensor_bytes_total",
        COUNTER,
        "Bytes of tensors that a worker has pushed and pulled.",
        lambda w: _by("direction", w.bytes, "pushed", "pulled"),
    ),
    Metric(
        "echelon_worker_network_bytes_total",
        COUNTER,
        "Bytes that went over the sockets of a worker.",
        lambda w: _by("direction", w.bytes, "sent", "received"),
    ),
    Metric(
        "echelon_worker_own_step_seconds",
        GAUGE,
        "The recent time of a worker alone per step: from a server's answer to the next push.",
        lambda w: _one(w.own_s),
    ),
    Metric(
        "echelon_worker_slowness_ratio",
        GAUGE,
        "That time of a slow worker as a multiple of the median of all workers.",
        lambda w: _one(w.slowness),
    ),
    Metric("echelon_worker_training_loss", GAUGE, "The latest training loss of a worker.", lambda w: _one(w.loss)),
    Metric(
        "echelon_worker_training_accuracy_ratio",
        GAUGE,
        "The latest training accuracy of a worker.",
        lambda w: _one(w.accuracy),
    ),
    Metric(
        "echelon_worker_report_timestamp_seconds",
        GAUGE,
        "The time of the last report of a worker.",
        lambda w: _one(w.reported_at),
    ),
    Metric(
        "echelon_worker_missed_updates",
        HISTOGRAM,
        "Updates of others between a read of a worker and its push, per step.",
        lambda w: _histogram(w.missed.steps),
    ),
    Metric(
        "echelon_worker_rounds_ahead",
        HISTOGRAM,
        "Rounds that a worker was ahead of the slowest one, per step.",
        lambda w: _histogram(w.ahead.steps),
    ),
)

SERVER: tuple[Metric[Server], ...] = (
    Metric("echelon_server_pushes_total", COUNTER, "Pushes that a server has received.", lambda s: _one(s.pushes)),
    Metric("echelon_server_updates_total", COUNTER, "Updates of weights on a server.", lambda s: _one(s.updates)),
    Metric("echelon_server_held_requests", GAUGE, "Requests that a server holds back.", lambda s: _one(s.held)),
    Metric(
        "echelon_server_network_bytes_total",
        COUNTER,
        "Bytes that went over the sockets of a server.",
        lambda s: _by("direction", {"sent": s.sent, "received": s.received}),
    ),
    Metric("echelon_server_resident_memory_bytes", GAUGE, "Memory of a server.", lambda s: _one(s.memory_bytes)),
    Metric("echelon_server_cpu_seconds_total", COUNTER, "CPU time of a server.", lambda s: _one(s.cpu_s)),
)


def metrics_text(shown: Snapshot) -> str:
    """Return all metrics of a run."""
    lines: list[str] = []
    for of_run in RUN:
        lines += _lines(of_run, of_run.samples(shown))
    for of_worker in WORKER:
        lines += _lines(of_worker, [_with(s, worker=w.rank) for w in shown.workers for s in of_worker.samples(w)])
    for of_server in SERVER:
        lines += _lines(of_server, [_with(s, server=x.rank) for x in shown.servers for s in of_server.samples(x)])
    return "\n".join(lines) + "\n"


def _with(sample: Sample, **labels: object) -> Sample:
    suffix, others, value = sample
    return suffix, {**labels, **others}, value


def _lines(metric: Metric[Of], samples: Samples) -> Iterator[str]:
    known = [(suffix, labels, value) for suffix, labels, value in samples if value is not None]
    if known:
        yield f"# HELP {metric.name} {metric.help}"
        yield f"# TYPE {metric.name} {metric.kind}"
    for suffix, labels, value in known:
        pairs = ",".join(f'{name}="{_escape(str(text))}"' for name, text in labels.items())
        yield f"{metric.name}{suffix}{f'{{{pairs}}}' if pairs else ''} {_number(value)}"


def _last(values: list[float | None]) -> float | None:
    return values[-1] if values else None


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(value)
