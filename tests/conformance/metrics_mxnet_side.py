"""Runs under MXNet's Python: the values of MXNet's metrics. Requests and values are JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

import mxnet as mx


def value(name: str, settings: dict[str, Any], batches: list[tuple[list[Any], list[Any]]]) -> list[Any]:
    """Return the name and the value of a metric after batches of (labels, predictions)."""
    metric = mx.metric.create(name, **settings)
    for labels, predictions in batches:
        metric.update([mx.nd.array(labels)], [mx.nd.array(predictions)])
    found, result = metric.get()
    return [found, float(result)]


print(json.dumps([value(**case) for case in json.load(sys.stdin)]))
