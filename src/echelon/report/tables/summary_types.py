"""The types of the fields of `summary.json` that the tables read. Other fields, and missing ones, are allowed."""

from __future__ import annotations

from typing import Any

import msgspec

from echelon.report.state.epochs import EpochRow


class _Pace(msgspec.Struct):
    slow: dict[int, float] | None = None
    stall: tuple[float, float] | None = None


class _Settings(msgspec.Struct):
    network: str = ""
    num_layers: int | None = None
    dtype: str | None = None
    benchmark: bool = False
    data: str = ""
    batch_size: int = 0
    lr: float | None = None
    kv_store: str = ""
    staleness: int | None = None
    groups: str | None = None
    seed: int | None = None
    num_epochs: int = 0
    target_accuracy: float | None = None
    devices: list[str] | None = None
    pace: _Pace | None = None


class _Validation(msgspec.Struct):
    seconds: float
    accuracy: float | None


class _Summary(msgspec.Struct):
    store: str | None = None
    accuracy: float | None = None
    samples_per_s: float | None = None
    exit_status: int | None = None
    settings: _Settings | None = None
    workers: list[dict[str, Any]] = []
    validations: list[_Validation] = []
    epochs: list[EpochRow] = []


def check_summary(body: dict[str, Any]) -> str | None:
    """Return what is wrong with the first field of a wrong type, or None."""
    try:
        msgspec.convert(body, _Summary, str_keys=True)
    except msgspec.ValidationError as error:
        problem, _, path = str(error).partition(" - at `$.")
        return f"{path.rstrip('`') or 'the file'}: {problem[:1].lower()}{problem[1:]}"
    return None
