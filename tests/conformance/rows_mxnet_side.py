"""Runs under MXNet's Python: pushes and pulls rows of a local store. Cases and results are JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

import mxnet as mx


def result(case: dict[str, Any]) -> list[Any]:
    """Push rows to a key that begins with ones, and return the rows and values that each pull brings."""
    shape = tuple(case["shape"])
    kv = mx.kv.create("local")
    kv.init("a", mx.nd.ones(shape).tostype("row_sparse"))
    if case["updater"]:
        kv._set_updater(lambda key, pushed, value: (value + pushed * 2).copyto(value))
    found = []
    for pushes, ids in case["steps"]:
        values = [
            mx.nd.sparse.row_sparse_array((mx.nd.array([[v] * shape[1] for v in numbers]), rows), shape=shape)
            for rows, numbers in pushes
        ]
        kv.push("a", values)
        out = mx.nd.sparse.zeros("row_sparse", shape)
        kv.row_sparse_pull("a", out=out, row_ids=mx.nd.array(ids, dtype="int64"))
        found.append([out.indices.asnumpy().tolist(), out.asnumpy().tolist()])
    return found


print(json.dumps([result(case) for case in json.load(sys.stdin)]))
