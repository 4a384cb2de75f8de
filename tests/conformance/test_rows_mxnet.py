"""Compares pushes of sparse values and `row_sparse_pull` of a local store with MXNet 1.9.1.

Needs MXNet's Python: .peers/mxnet, or the one that ECHELON_MXNET_PYTHON names.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from echelon.kvstore import create
from mxnet_peer import run_mxnet

pytestmark = pytest.mark.peer

SHAPE = (6, 2)
STEPS = [  # the values of each device as rows and numbers, then the rows to pull
    ([([3], [2.0])], [0, 3, 3, 5]),
    ([([3], [2.0]), ([0, 3], [1.0, 4.0])], [[5, 3], [0, 1]]),
    ([([1, 5], [0.5, -1.0])], [2, 1, 0]),
]
CASES: list[dict[str, Any]] = [{"shape": SHAPE, "updater": updater, "steps": STEPS} for updater in (False, True)]


def ours(case: dict[str, Any]) -> list[Any]:
    with create("local") as kv:
        kv.init("a", torch.ones(SHAPE).to_sparse(1))
        if case["updater"]:
            kv.set_updater(lambda key, total, value: value.add_(total * 2))
        found = []
        for pushes, ids in case["steps"]:
            kv.push("a", [_sparse(rows, numbers) for rows, numbers in pushes])
            out = _sparse([], [])
            kv.row_sparse_pull("a", out, row_ids=torch.tensor(ids))
            found.append([out.coalesce().indices()[0].tolist(), out.to_dense().tolist()])
    return found


def _sparse(rows: list[int], numbers: list[float]) -> torch.Tensor:
    indices = torch.tensor([rows], dtype=torch.int64).view(1, -1)
    values = torch.tensor(numbers)[:, None].expand(-1, SHAPE[1]).contiguous()
    return torch.sparse_coo_tensor(indices, values, SHAPE, check_invariants=True)


def test_rows_match_mxnet() -> None:
    for case, theirs in zip(CASES, run_mxnet("rows_mxnet_side.py", CASES), strict=True):
        assert ours(case) == theirs, case
