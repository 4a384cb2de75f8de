"""Runs under MXNet's Python: makes the calls of each case on a local store. Cases and results are JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

import mxnet as mx


def result(case: dict[str, Any]) -> list[list[float]]:
    """Push the values to the keys, which begin with ones, and return what each out gets."""
    kv = mx.kv.create(case["store"])
    kv.init(sorted(set(case["keys"])), [mx.nd.ones((3,), dtype=case["dtype"]) for _ in set(case["keys"])])
    if case["updater"]:
        kv._set_updater(lambda key, pushed, value: value.__iadd__(pushed.astype(value.dtype) * 2))
    kv.push(case["keys"], [[mx.nd.array(one, dtype=case["pushed"]) for one in values] for values in case["values"]])
    outs = [mx.nd.zeros((3,), dtype=case["out"]) for _ in case["keys"]]
    kv.pull(case["keys"], out=outs)
    return [out.asnumpy().astype(float).tolist() for out in outs]


print(json.dumps([result(case) for case in json.load(sys.stdin)]))
