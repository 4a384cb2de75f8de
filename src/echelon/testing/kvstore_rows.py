"""Checks of sparse values: rows are summed by their numbers, and rows can be pulled one by one."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Adagrad

from echelon.kvstore import KVStore
from echelon.testing.assertions import assert_tensor
from echelon.testing.trial import Trial, pull_all_pushes

ROWS, WIDTH = 200, 3  # more rows than one block of a server has


def sparse_pushes_are_summed_by_row(trial: Trial) -> None:
    """A key is stored by rows or not: the sum is the same. A row that no worker names keeps its value."""
    workers = trial.num_workers

    def program(kv: KVStore) -> None:
        start = torch.arange(float(ROWS * WIDTH)).view(ROWS, WIDTH)
        kv.init("dense", start)
        kv.init("rows", start, row_sparse=True)
        kv.init("sparse", _sparse([(5, 1.0)], dtype=torch.float64))
        kv.set_optimizer("sgd", lr=1.0, maximize=True)
        for name in ("dense", "rows"):
            kv.push(name, _sparse([(7, 1.0), (199, 2.0), (7, 3.0), (70 + kv.rank, 5.0)]))
            kv.push(name, _sparse([]))  # this batch has no rows
            out = torch.empty(ROWS, WIDTH)
            pull_all_pushes(kv, name, out)
            expected = start.clone()
            expected[7] += 4.0 * workers
            expected[199] += 2.0 * workers
            expected[70 : 70 + workers] += 5.0
            assert_tensor(f"rows pushed to a key that is {name}", out, expected)
        kv.push("sparse", [_sparse([(5, 1.0)]), _sparse([(199, 1.0), (5, 1.0)])])
        wide = torch.empty(ROWS, WIDTH, dtype=torch.float64)
        pull_all_pushes(kv, "sparse", wide)
        assert_tensor("a sparse first value", wide[5], 1.0 + 2.0 * workers)
        assert_tensor("other rows of it", wide[199], float(workers))
        kv.push("rows", torch.ones(ROWS, WIDTH))
        pull_all_pushes(kv, "rows", out)
        assert_tensor("a dense push of all rows", out - expected, float(workers))

    trial(program)


def rows_can_be_pulled_by_number(trial: Trial) -> None:
    """Numbers may repeat and have any order and shape; a sparse out has exactly these rows."""

    def program(kv: KVStore) -> None:
        start = torch.arange(float(ROWS * WIDTH)).view(ROWS, WIDTH)
        for name, row_sparse in (("dense", False), ("rows", True)):
            kv.init(name, start, row_sparse=row_sparse)
            numbers = torch.tensor([[199, 0], [64, 199]])
            out = torch.empty(2, 2, WIDTH)
            kv.row_sparse_pull(name, out, row_ids=numbers)
            assert_tensor(f"rows of a key that is {name}", out, start[numbers])
            sparse = _sparse([(1, 1.0)])
            kv.row_sparse_pull(name, sparse, row_ids=numbers.to(torch.int32))
            assert_tensor("the rows of a sparse out", sparse.coalesce().indices()[0], torch.tensor([0, 64, 199]))
            assert_tensor("their values", sparse.coalesce().values(), start[[0, 64, 199]])
            nothing = torch.empty(0, WIDTH)
            kv.row_sparse_pull(name, nothing, row_ids=torch.empty(0, dtype=torch.int64))
        first, second = torch.empty(1, WIDTH), torch.empty(2, WIDTH)
        ids = [torch.tensor([3]), torch.tensor([4, 5])]
        kv.row_sparse_pull(["dense", "rows"], [first, second], row_ids=ids)
        assert_tensor("two keys in one call", torch.cat([first, second]), start[3:6])
        kv.barrier()

    trial(program)


def a_sparse_push_replaces_the_value(trial: Trial) -> None:
    """Without an optimizer the sum replaces the value: rows that no worker names become zero."""
    if not trial.push_replaces:
        return
    workers = trial.num_workers

    def program(kv: KVStore) -> None:
        for name, row_sparse in (("dense", False), ("rows", True)):
            kv.init(name, torch.ones(ROWS, WIDTH), row_sparse=row_sparse)
            out = torch.empty(ROWS, WIDTH)
            for row in (3, 150):
                kv.pushpull(name, _sparse([(row, 2.0)]), out)
                assert_tensor(f"the row that was pushed to {name}", out[row], 2.0 * workers)
                assert_tensor("the sum of all rows", out.sum(), 2.0 * workers * WIDTH)

    trial(program)


def rows_are_updated_as_torch_does(trial: Trial) -> None:
    """Adagrad changes only the rows that are pushed, and the states of these rows."""

    def program(kv: KVStore) -> Tensor:
        start = torch.linspace(-1, 1, ROWS * WIDTH).view(ROWS, WIDTH)
        kv.init("rows", start, row_sparse=True)
        kv.set_optimizer("adagrad", lr=0.5)
        out = torch.empty(ROWS, WIDTH)
        for step in range(3):
            kv.push("rows", _sparse([(step, 1.0), (100, 0.5 + step)]))
            kv.pull("rows", out)
        return out

    table = torch.nn.Parameter(torch.linspace(-1, 1, ROWS * WIDTH).view(ROWS, WIDTH))
    optimizer = Adagrad([table], lr=0.5)
    for step in range(3):
        table.grad = _sparse([(step, 1.0), (100, 0.5 + step)]).to_dense()
        optimizer.step()
    torch.testing.assert_close(trial.alone(program), table.detach())


def _sparse(rows: list[tuple[int, float]], dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a sparse value with these rows, each filled with a number."""
    numbers = torch.tensor([[row for row, _ in rows]], dtype=torch.int64).view(1, -1)
    values = torch.tensor([number for _, number in rows], dtype=dtype)[:, None].expand(-1, WIDTH).contiguous()
    return torch.sparse_coo_tensor(numbers, values, (ROWS, WIDTH), check_invariants=True)
