"""What the display says in words: the start of a run, its progress, its metrics. Pure functions of the state."""

from __future__ import annotations

import re
from collections.abc import Iterable

from echelon.report.state.run import JobInfo, RunState
from echelon.report.state.worker import FIRST_STEP, LOADING, REGISTERED, TRAINING
from echelon.report.terminal.columns import metric

STARTING = "starting"
ENDED = "measuring and saving the final weights"
NEWS_SHOWN = 3
PASSING_S = 15.0  # a worker that still waits says so again every 10 s
_BYTE_UNITS = ("B", "kB", "MB", "GB", "TB")
_PHASES = (STARTING, LOADING, REGISTERED, FIRST_STEP)  # in the order in which a worker reaches them


def start_line(info: JobInfo) -> str:
    """Return which processes are started."""
    parts = [_count(info.num_workers, "worker")]
    if info.num_servers:
        parts = ["1 scheduler", _count(info.num_servers, "server"), *parts]
    return f"starting {_count(info.num_processes, 'process', 'es')}: {', '.join(parts)}"


def phase_of_start(info: JobInfo, state: RunState) -> str:
    """Return what the job does before its first step: what the last of its processes does."""
    phases = set(_phases(info, state, "worker").values())
    servers = set(_phases(info, state, "server").values())
    if not phases:
        return STARTING  # the numbers of processes are not known yet
    if STARTING in phases | servers:
        return f"{STARTING} {_count(info.num_processes, 'process', 'es')}"
    return "connecting" if (earliest := min(phases, key=_PHASES.index)) == REGISTERED else earliest


def processes_lines(info: JobInfo, state: RunState) -> list[str]:
    """Return what each server and worker does before the first step, one line per role."""
    lines = []
    for role in ("server", "worker"):
        by_phase: dict[str, list[int]] = {}
        for rank, phase in _phases(info, state, role).items():
            by_phase.setdefault(phase, []).append(rank)
        parts = [f"{ranges(by_phase[phase])} {phase}" for phase in reversed(_PHASES) if phase in by_phase]
        if parts:
            lines.append(f"  {role}s  {'; '.join(parts)}")
    return lines


def _phases(info: JobInfo, state: RunState, role: str) -> dict[int, str]:
    count = info.num_workers if role == "worker" else info.num_servers
    return {rank: state.processes.get(f"{role} {rank}", STARTING) for rank in range(count)}


def epoch_text(state: RunState) -> str:
    """Return the epoch of the slowest worker, as `epoch 3 of 16`."""
    known = [worker for worker in state.active or state.ranked if worker.batches_per_epoch]
    if not known:
        return TRAINING
    slowest = min(known, key=lambda worker: worker.epochs_done)
    epoch = min(int(slowest.epochs_done) + 1, slowest.num_epochs)
    return f"epoch {epoch} of {slowest.num_epochs}"


def validation_text(state: RunState) -> str:
    """Return which weights are being measured; nothing while no validation runs."""
    return f"validating after epoch {state.validating['epoch']:g}" if state.validating else ""


def validation_progress(state: RunState) -> str:
    """Return how far the present validation is."""
    assert state.validating is not None
    return f"{validation_text(state)}: {state.validating['done']} of {state.validating['total']}"


def metric_lines(state: RunState, width: int = 1000) -> list[str]:
    """Return loss and accuracy: of the training samples, as a mean over the workers, and of the last validation.

    What does not fit into `width` columns is left out, and no number is cut.
    """
    lines = []
    measured = [worker for worker in state.ranked if not worker.is_gone and worker.accuracy is not None]
    if measured:
        accuracy = sum(worker.accuracy or 0.0 for worker in measured) / len(measured)
        loss = sum(worker.loss or 0.0 for worker in measured) / len(measured)
        lines.append(_fitting(["training  ", f"accuracy {metric(accuracy)}", f"loss {metric(loss)}"], width))
    if state.validations:
        last = state.validations[-1]
        values = [f"accuracy {metric(last['accuracy'])}", f"loss {metric(last['loss'])}"]
        lines.append(_fitting(["validation", *values, f"epoch {last['epoch']:g}"], width))
    return lines


def _fitting(parts: list[str], width: int) -> str:
    while len(parts) > 1 and len("  ".join(parts)) > width:
        parts = parts[:-1]
    return "  ".join(parts)


def news_lines(state: RunState, now: float, most: int) -> list[str]:
    """Return the latest news with their time since the beginning, without process numbers and addresses."""
    shown = [news for news in state.news if not news.passing or now - news.at < PASSING_S]
    return [
        f"{duration(news.at - (state.began or news.at))}  {re.sub(r' [(]pid .*? on .*?[)]', '', news.text)}"
        for news in shown[-most:]
    ]


def progress_line(state: RunState, now: float) -> str:
    """Return the state of a run that trains, in one line."""
    if not state.active:
        return f"{ENDED}, {validation_progress(state)}" if state.validating else ENDED
    parts = [epoch_text(state)]
    if (fraction := state.fraction_done) is not None:
        parts.append(f"{fraction:.0%}")
    if (left := state.seconds_left(now)) is not None:
        parts.append(f"{duration(left)} left")
    parts.append(f"{sum(worker.rate for worker in state.active):.0f} samples/s")
    parts += [" ".join(line.split()) for line in metric_lines(state)]
    if state.validating:
        parts.append(validation_progress(state))
    return ", ".join(parts)


def duration(seconds: float) -> str:
    """Return a duration as `0:07`, `12:34` or `1:02:03`."""
    whole = round(seconds)
    minutes, rest = whole // 60 % 60, whole % 60
    return f"{whole // 3600}:{minutes:02}:{rest:02}" if whole >= 3600 else f"{minutes}:{rest:02}"


def bytes_text(number: float) -> str:
    """Return a number of bytes with two or three digits and its unit: `954 kB`, `1.0 MB`."""
    power = 0
    while number >= 999.5 and power < len(_BYTE_UNITS) - 1:
        number, power = number / 1000, power + 1
    return f"{number:.{1 if power and number < 9.95 else 0}f} {_BYTE_UNITS[power]}"


def ranges(numbers: Iterable[int]) -> str:
    """Return sorted numbers with runs of three and more abbreviated: `0, 1, 4-7`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)


def printable(text: str) -> str:
    """Return a text without control characters, which a warning of a user's program may have."""
    return "".join(one if one.isprintable() else " " for one in text)


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{'' if number == 1 else plural}"
