"""Errors about keys, shapes, dtypes and values: their messages, and that the job continues after each of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from error_jobs import DEADLINE_S, STORES, check_still_works, error_of, prepare, run_job

import forked
from echelon.errors import UsageError
from echelon.kvstore import KVStore, create
from echelon.launch.threads.in_process import run


@pytest.mark.parametrize(
    ("value", "given"),
    [
        (torch.ones(4), "4 float32"),
        (torch.ones(3, 1), "3x1 float32"),
        (torch.tensor(1.0), "scalar float32"),
        (torch.ones(4, dtype=torch.float64), "4 float64"),
    ],
)
@pytest.mark.parametrize("store", STORES)
def test_a_push_of_another_shape_names_both(store: str, value: torch.Tensor, given: str) -> None:
    def program(kv: KVStore) -> tuple[str, str, str]:
        prepare(kv)
        pushed = error_of(lambda: kv.push("good", value))
        exchanged = error_of(lambda: kv.pushpull("good", value))
        pulled = error_of(lambda: kv.pull("good", value))
        check_still_works(kv)
        return pushed, exchanged, pulled

    for rank, (pushed, exchanged, pulled) in enumerate(run_job(program, store)):
        assert pushed == exchanged == f"worker {rank}: key 'good' is 3 float32, but {given} was pushed"
        assert pulled == f"worker {rank}: key 'good' is 3 float32, but {given} was given for out"


def test_the_value_of_one_device_does_not_fit() -> None:
    def program(kv: KVStore) -> str:
        prepare(kv)
        message = error_of(lambda: kv.push("good", [torch.ones(3), torch.ones(2)]))
        check_still_works(kv)
        return message

    assert "3 float32, but 2 float32 was pushed" in run_job(program)[1]


@pytest.mark.parametrize("other", [torch.zeros(2, 3), torch.zeros(3, 2, dtype=torch.float16)])
def test_workers_that_init_a_key_differently(other: torch.Tensor) -> None:
    """The second worker gets an error with both shapes. The first waits until the second has corrected its call."""
    mine = torch.zeros(3, 2)

    def program(kv: KVStore) -> str:
        first, second = (mine, other) if kv.rank == 0 else (other, mine)
        message = error_of(lambda: kv.init("w", first))
        if message:
            kv.init("w", second)
        prepare(kv)
        check_still_works(kv)
        return message

    messages = run_job(program)
    assert sorted(map(bool, messages)) == [False, True], messages
    rank = 0 if messages[0] else 1
    theirs, own = ("2x3 float32", "3x2 float32") if rank == 0 else ("3x2 float32", "2x3 float32")
    if other.dtype == torch.float16:
        theirs, own = (text.replace("2x3 float32", "3x2 float16") for text in (theirs, own))
    assert messages[rank] == f"worker {rank}: server 0: key 'w' is {theirs} on the servers but {own} on this worker"


@pytest.mark.parametrize("dtype", [torch.bool, torch.complex64, torch.float8_e5m2])
def test_a_dtype_that_cannot_be_stored(dtype: torch.dtype) -> None:
    def program(kv: KVStore) -> str:
        message = error_of(lambda: kv.init("odd", torch.zeros(2).to(dtype)))
        prepare(kv)
        check_still_works(kv)
        return message

    name = str(dtype).removeprefix("torch.")
    assert all(f"key 'odd': dtype {name} cannot be stored; use one of float32" in text for text in run_job(program))


@pytest.mark.parametrize("wrong", [0, 1])
@pytest.mark.parametrize("runs", [run, forked.run])
def test_a_value_that_is_not_dense_is_rejected_before_the_key_is_sent(
    runs: Callable[..., list[list[str]]], wrong: int
) -> None:
    """A worker can correct its mistake, and no other worker waits for it."""

    def program(kv: KVStore) -> list[str]:
        bad = [torch.eye(3).to_sparse(), torch.zeros(3, 3, device="meta")] if kv.rank == wrong else []
        messages = [error_of(lambda value=value: kv.init("w", value)) for value in bad]  # type: ignore[misc]
        kv.init("w", torch.zeros(3, 3))
        for call in (kv.push, kv.pull, kv.pushpull):
            assert [error_of(lambda value=value: call("w", value)) for value in bad] == messages  # type: ignore[misc]  # noqa: B023
        check_still_works(kv, "w", (3, 3))
        return messages

    messages = runs(program, "dist_sync", num_workers=2, timeout_s=DEADLINE_S)
    assert messages[1 - wrong] == []
    assert messages[wrong] == [
        "key 'w': a value of layout torch.sparse_coo with 2 sparse dimensions cannot be stored or sent; make it dense "
        "(to_dense()) or sparse by rows (to_sparse(1))",
        "key 'w': a value on device meta has no elements to store or send",
    ]


@pytest.mark.parametrize("store", STORES)
def test_a_key_that_was_never_initialised(store: str) -> None:
    def program(kv: KVStore) -> list[str]:
        prepare(kv)
        value = torch.ones(3)
        messages = [
            error_of(lambda: kv.pull("w", value)),
            error_of(lambda: kv.push("w", value)),
            error_of(lambda: kv.pushpull(["good", "w"], [value, value])),
        ]
        check_still_works(kv)
        return messages

    for rank, messages in enumerate(run_job(program, store)):
        assert messages == [f"worker {rank}: key 'w' is not initialised; call init before push or pull"] * 3


def test_a_key_cannot_be_initialised_twice() -> None:
    def program(kv: KVStore) -> list[str]:
        prepare(kv)
        messages = [
            error_of(lambda: kv.init("good", torch.zeros(3))),
            error_of(lambda: kv.init(["new", "good"], [torch.zeros(1), torch.zeros(3)])),
            error_of(lambda: kv.init(["one", "one"], [torch.zeros(1), torch.zeros(1)])),
        ]
        kv.init("new", torch.zeros(3))
        check_still_works(kv)
        check_still_works(kv, "new")
        return messages

    for rank, messages in enumerate(run_job(program)):
        assert messages[:2] == [f"worker {rank}: key 'good' is already initialised"] * 2
        assert messages[2] == f"worker {rank}: a key appears twice in ['one', 'one']"


@pytest.mark.parametrize(("first", "second"), [("good", 3), (3, "good")])
def test_ints_and_strings_do_not_mix(first: Any, second: Any) -> None:
    def program(kv: KVStore) -> list[str]:
        ones = torch.ones(3)
        messages = [error_of(lambda: kv.init([first, second], [ones, ones]))]
        kv.init(first, torch.zeros(3))
        messages += [
            error_of(lambda: kv.init(second, ones)),
            error_of(lambda: kv.push(second, ones)),
            error_of(lambda: kv.pull(second, ones)),
            error_of(lambda: kv.pushpull([first, second], [ones, ones])),
        ]
        check_still_works(kv, first)
        return messages

    for rank, messages in enumerate(run_job(program)):
        for message in messages:
            assert message.startswith(f"worker {rank}: the keys of a store must be all ints or all strings")


@pytest.mark.parametrize("key", [None, 1.5, True, ("a", 2.0)])
def test_a_key_is_a_string_or_an_int(key: Any) -> None:
    with create("local") as kv:
        values = [torch.ones(1)] * len(key) if isinstance(key, tuple) else torch.ones(1)
        with pytest.raises(UsageError, match="a key must be a string or an int"):
            kv.init(key, values)
        kv.init("good", torch.zeros(3))
        check_still_works(kv)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        (["a", "b"], [torch.ones(3)], "2 keys but 1 values"),
        (["a", "b"], torch.ones(2, 3), "2 keys but 1 values"),
        ("a", [], "key 'a': the list of values is empty"),
        ("a", [1.0, 2.0], "key 'a': a value must be a torch tensor or a list of them, not float"),
        ("a", 1.0, "key 'a': a value must be a torch tensor or a list of them, not float"),
    ],
)
def test_values_in_an_invalid_form(key: Any, value: Any, words: str) -> None:
    with create("local") as kv:
        kv.init(["a", "b", "good"], [torch.zeros(3)] * 3)
        for call in (kv.push, kv.pull, kv.pushpull):
            assert words in error_of(lambda call=call: call(key, value))  # type: ignore[misc]
        check_still_works(kv)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("store", STORES)
def test_check_finite_rejects_a_value_on_the_worker_that_has_it(store: str, bad: float) -> None:
    def program(kv: KVStore) -> str:
        prepare(kv)
        message = ""
        if kv.rank == 1:
            message = error_of(lambda: kv.push("good", torch.tensor([0.0, bad, 0.0])))
            assert message == error_of(lambda: kv.pushpull("good", torch.tensor([0.0, bad, 0.0])))
        check_still_works(kv)
        return message

    messages = run_job(program, store, check_finite=True)
    assert messages == ["", "worker 1: the value pushed for key 'good' contains NaN or infinity"]


def test_without_check_finite_a_nan_is_sent() -> None:
    def program(kv: KVStore) -> bool:
        kv.init("w", torch.zeros(2))
        out = torch.empty(2)
        kv.pushpull("w", torch.tensor([float(kv.rank), float("nan")]), out)
        return bool(out[1].isnan()) and float(out[0]) == 1.0

    assert run_job(program) == [True, True]
