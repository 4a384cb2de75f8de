"""Compares the calls of a local store with MXNet 1.9.1: values of other dtypes, keys named twice, and updaters.

Needs MXNet's Python: .peers/mxnet, or the one that ECHELON_MXNET_PYTHON names.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from echelon.kvstore import create
from mxnet_peer import run_mxnet

pytestmark = pytest.mark.peer

DTYPES = ("float32", "float16", "float64", "int32", "uint8")
KEYS = (["a"], ["a", "b", "a"])
# MXNet's "local" store rejects several values of another dtype than the key's. Its "device" store casts them.
CASES: list[dict[str, Any]] = [
    {
        "store": "device",
        "keys": keys,
        "dtype": dtype,
        "pushed": pushed,
        "out": out,
        "updater": updater,
        "values": [[[1.7, 2.2, 5.0]] * (1 + index % 2) for index in range(len(keys))],
    }
    for dtype, pushed, out, keys, updater in itertools.product(DTYPES, DTYPES, DTYPES, KEYS, (False, True))
    # After one push of floats, MXNet's integer key holds floats; after a push of two values it is still integer.
    if "float" in dtype or "float" not in pushed
]


def ours(case: dict[str, Any]) -> list[list[float]]:
    dtype, pushed, out = (getattr(torch, case[name]) for name in ("dtype", "pushed", "out"))
    with create(case["store"]) as kv:
        kv.init(sorted(set(case["keys"])), [torch.ones(3, dtype=dtype) for _ in set(case["keys"])])
        if case["updater"]:
            kv.set_updater(lambda key, total, value: value.add_(total * 2))
        values = [[torch.tensor(one).to(pushed) for one in values] for values in case["values"]]
        kv.push(case["keys"], values)
        outs = [torch.zeros(3, dtype=out) for _ in case["keys"]]
        kv.pull(case["keys"], outs)
    return [tensor.double().tolist() for tensor in outs]


def test_dtypes_and_repeated_keys_match_mxnet() -> None:
    """Within the rounding of the coarsest dtype of a case: two sums and a cast."""
    for case, theirs in zip(CASES, run_mxnet("kvstore_mxnet_side.py", CASES), strict=True):
        coarsest = torch.float16 if "float16" in case.values() else torch.float32
        tolerance = 4 * torch.finfo(coarsest).eps
        found, wanted = torch.tensor(ours(case)), torch.tensor(theirs)
        assert torch.allclose(found, wanted, rtol=tolerance, atol=0.0), f"{case}: {found}, but MXNet has {wanted}"
