"""What a mistake says, on which worker, and that the job goes on after it.

Every test ends with a correct call on all workers: an error that harmed the servers, or left a worker out of step,
would show there as a wrong sum or as a wait that misses its deadline.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import forked
from echelon.environment import Job
from echelon.errors import DataError, EchelonError, UsageError
from echelon.kvstore import KVStore, create
from echelon.kvstore.create import join
from echelon.launch.in_process import run
from echelon.scheduler.serve import serve as serve_scheduler
from echelon.server.serve import serve as serve_server
from echelon.transport import SharedMemoryTransport, TcpTransport
from echelon.transport.in_process import InProcessTransport

DEADLINE_S = 10.0
STORES: dict[str, dict[str, Any]] = {
    "dist_sync": {},
    "dist_async": {},
    "dist_ssync": {"staleness": 1},
    "dist_gsync": {"groups": [[0, 1]]},
}


def job(program: Callable[[KVStore], Any], store: str = "dist_sync", **options: Any) -> list[Any]:
    return run(program, store, **{"num_workers": 2, "timeout_s": DEADLINE_S, **STORES[store], **options})


def error_of(call: Callable[[], object]) -> str:
    """The message of the UsageError a call raises, or nothing."""
    try:
        call()
    except UsageError as error:
        return str(error)
    return ""


def still_works(kv: KVStore, key: Any = "good", shape: tuple[int, ...] = (3,)) -> None:
    """A push of ones by every worker is their number."""
    out = torch.empty(shape)
    kv.pushpull(key, torch.ones(shape), out)
    kv.pull(key, out)
    kv.barrier()
    kv.pull(key, out)
    assert out.eq(kv.num_workers).all(), f"worker {kv.rank}: {out}"
    kv.barrier()


def prepared(kv: KVStore) -> None:
    kv.init("good", torch.zeros(3))
    if kv.type != "dist_sync":
        kv.set_optimizer("sgd", lr=1.0, maximize=True)


# --- shapes, dtypes, keys


@pytest.mark.parametrize(
    ("value", "given"),
    [
        (torch.ones(4), "4 float32"),
        (torch.ones(3, 1), "3x1 float32"),
        (torch.tensor(1.0), "scalar float32"),
        (torch.ones(3, dtype=torch.float64), "3 float64"),
        (torch.ones(3, dtype=torch.int64), "3 int64"),
    ],
)
@pytest.mark.parametrize("store", STORES)
def test_a_push_that_does_not_fit_names_both_sides(store: str, value: torch.Tensor, given: str) -> None:
    def program(kv: KVStore) -> tuple[str, str, str]:
        prepared(kv)
        pushed = error_of(lambda: kv.push("good", value))
        exchanged = error_of(lambda: kv.pushpull("good", value))
        pulled = error_of(lambda: kv.pull("good", value))
        still_works(kv)
        return pushed, exchanged, pulled

    for rank, (pushed, exchanged, pulled) in enumerate(job(program, store)):
        assert pushed == exchanged == f"worker {rank}: key 'good' is 3 float32, but {given} was pushed"
        assert pulled == f"worker {rank}: key 'good' is 3 float32, but {given} was given for out"


def test_one_of_several_devices_does_not_fit() -> None:
    def program(kv: KVStore) -> str:
        prepared(kv)
        message = error_of(lambda: kv.push("good", [torch.ones(3), torch.ones(2)]))
        still_works(kv)
        return message

    assert "3 float32, but 2 float32 was pushed" in job(program)[1]


@pytest.mark.parametrize("other", [torch.zeros(2, 3), torch.zeros(3, 2, dtype=torch.float16)])
def test_workers_that_init_a_key_differently(other: torch.Tensor) -> None:
    """Whoever comes second hears of it, with both sides; the first waits for it to mend its call."""
    mine = torch.zeros(3, 2)

    def program(kv: KVStore) -> str:
        first, second = (mine, other) if kv.rank == 0 else (other, mine)
        message = error_of(lambda: kv.init("w", first))
        if message:
            kv.init("w", second)
        prepared(kv)
        still_works(kv)
        return message

    heard = job(program)
    assert sorted(map(bool, heard)) == [False, True], heard
    rank = 0 if heard[0] else 1
    theirs, own = ("2x3 float32", "3x2 float32") if rank == 0 else ("3x2 float32", "2x3 float32")
    if other.dtype == torch.float16:
        theirs, own = (text.replace("2x3 float32", "3x2 float16") for text in (theirs, own))
    assert heard[rank] == f"worker {rank}: server 0: key 'w' is {theirs} on the servers but {own} on this worker"


@pytest.mark.parametrize("dtype", [torch.bool, torch.complex64, torch.float8_e5m2])
def test_a_dtype_that_cannot_be_stored(dtype: torch.dtype) -> None:
    def program(kv: KVStore) -> str:
        message = error_of(lambda: kv.init("odd", torch.zeros(2).to(dtype)))
        prepared(kv)
        still_works(kv)
        return message

    name = str(dtype).removeprefix("torch.")
    assert all(f"key 'odd': dtype {name} cannot be stored; use one of float32" in text for text in job(program))


@pytest.mark.parametrize("wrong", [0, 1])
@pytest.mark.parametrize("runs", [run, forked.run])
def test_a_value_that_is_not_dense_is_refused_before_anybody_hears_of_the_key(
    runs: Callable[..., list[list[str]]], wrong: int
) -> None:
    """So one worker's mistake, mended there, keeps no other waiting."""

    def program(kv: KVStore) -> list[str]:
        bad = [torch.eye(3).to_sparse(), torch.zeros(3, 3, device="meta")] if kv.rank == wrong else []
        heard = [error_of(lambda value=value: kv.init("w", value)) for value in bad]  # type: ignore[misc]
        kv.init("w", torch.zeros(3, 3))
        for call in (kv.push, kv.pull, kv.pushpull):
            assert [error_of(lambda value=value: call("w", value)) for value in bad] == heard  # type: ignore[misc]  # noqa: B023
        still_works(kv, "w", (3, 3))
        return heard

    heard = runs(program, "dist_sync", num_workers=2, timeout_s=DEADLINE_S)
    assert heard[1 - wrong] == []
    assert heard[wrong] == [
        "key 'w': a value of layout torch.sparse_coo cannot be kept or sent; make it dense (to_dense())",
        "key 'w': a value on device meta has no elements to keep or send",
    ]


@pytest.mark.parametrize("store", STORES)
def test_a_key_that_was_never_initialised(store: str) -> None:
    def program(kv: KVStore) -> list[str]:
        prepared(kv)
        value = torch.ones(3)
        heard = [
            error_of(lambda: kv.pull("w", value)),
            error_of(lambda: kv.push("w", value)),
            error_of(lambda: kv.pushpull(["good", "w"], [value, value])),
        ]
        still_works(kv)
        return heard

    for rank, heard in enumerate(job(program, store)):
        assert heard == [f"worker {rank}: key 'w' is not initialised; call init before push or pull"] * 3


def test_init_twice() -> None:
    def program(kv: KVStore) -> list[str]:
        prepared(kv)
        heard = [
            error_of(lambda: kv.init("good", torch.zeros(3))),
            error_of(lambda: kv.init(["new", "good"], [torch.zeros(1), torch.zeros(3)])),
            error_of(lambda: kv.init(["one", "one"], [torch.zeros(1), torch.zeros(1)])),
        ]
        kv.init("new", torch.zeros(3))
        still_works(kv)
        still_works(kv, "new")
        return heard

    for rank, heard in enumerate(job(program)):
        assert heard[:2] == [f"worker {rank}: key 'good' is initialised already"] * 2
        assert heard[2] == f"worker {rank}: a key stands twice in ['one', 'one']"


@pytest.mark.parametrize(("first", "second"), [("good", 3), (3, "good")])
def test_ints_and_strings_do_not_mix(first: Any, second: Any) -> None:
    def program(kv: KVStore) -> list[str]:
        ones = torch.ones(3)
        heard = [error_of(lambda: kv.init([first, second], [ones, ones]))]
        kv.init(first, torch.zeros(3))
        heard += [
            error_of(lambda: kv.init(second, ones)),
            error_of(lambda: kv.push(second, ones)),
            error_of(lambda: kv.pull(second, ones)),
            error_of(lambda: kv.pushpull([first, second], [ones, ones])),
        ]
        still_works(kv, first)
        return heard

    for rank, heard in enumerate(job(program)):
        for message in heard:
            assert message.startswith(f"worker {rank}: keys of one store are all ints or all strings")


@pytest.mark.parametrize("key", [None, 1.5, True, ("a", 2.0)])
def test_a_key_is_a_string_or_an_int(key: Any) -> None:
    with create("local") as kv:
        values = [torch.ones(1)] * len(key) if isinstance(key, tuple) else torch.ones(1)
        with pytest.raises(UsageError, match="a key must be a string or an int"):
            kv.init(key, values)
        kv.init("good", torch.zeros(3))
        still_works(kv)


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
def test_values_in_a_form_that_cannot_be(key: Any, value: Any, words: str) -> None:
    with create("local") as kv:
        kv.init(["a", "b", "good"], [torch.zeros(3)] * 3)
        for call in (kv.push, kv.pull, kv.pushpull):
            assert words in error_of(lambda call=call: call(key, value))  # type: ignore[misc]
        still_works(kv)


# --- NaN


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("store", STORES)
def test_check_finite_stops_a_value_on_the_worker_that_has_it(store: str, bad: float) -> None:
    def program(kv: KVStore) -> str:
        prepared(kv)
        message = ""
        if kv.rank == 1:
            message = error_of(lambda: kv.push("good", torch.tensor([0.0, bad, 0.0])))
            assert message == error_of(lambda: kv.pushpull("good", torch.tensor([0.0, bad, 0.0])))
        still_works(kv)
        return message

    heard = job(program, store, check_finite=True)
    assert heard == ["", "worker 1: the value pushed for key 'good' has NaN or infinity in it"]


def test_without_check_finite_a_nan_travels() -> None:
    def program(kv: KVStore) -> bool:
        kv.init("w", torch.zeros(2))
        out = torch.empty(2)
        kv.pushpull("w", torch.tensor([float(kv.rank), float("nan")]), out)
        return bool(out[1].isnan()) and float(out[0]) == 1.0

    assert job(program) == [True, True]


# --- optimizers


@pytest.mark.parametrize("transport", [None, SharedMemoryTransport, TcpTransport])
def test_workers_that_set_different_optimizers(transport: Any) -> None:
    """One is taken, by all servers alike; the other worker hears both, and may then agree."""

    def program(kv: KVStore) -> str:
        kv.init("good", torch.zeros(100_000))  # on both servers
        rates = (1.0, 4.0) if kv.rank == 0 else (4.0, 1.0)
        message = error_of(lambda: kv.set_optimizer("sgd", lr=rates[0], maximize=True))
        if message:
            kv.set_optimizer("sgd", lr=rates[1], maximize=True)
        kv.barrier()
        out = torch.empty(100_000)
        kv.pushpull("good", torch.ones(100_000), out)
        assert out.eq(out[0]).all(), "servers run different optimizers"
        return message

    for _ in range(5):  # who comes first is a race; whoever it is, the rest holds
        heard = job(program, transport=transport() if transport else None)
        assert sorted(map(bool, heard)) == [False, True], heard
        rank = 0 if heard[0] else 1
        assert heard[rank].startswith(f"worker {rank}: server 0: the servers run sgd(")
        theirs, own = heard[rank].split(", but this worker set sgd(")
        assert f"lr={(4.0, 1.0)[rank]}" in theirs
        assert f"lr={(1.0, 4.0)[rank]}" in own


def test_a_different_kind_of_optimizer_is_refused_too() -> None:
    def program(kv: KVStore) -> str:
        prepared(kv)
        kv.set_optimizer("sgd", lr=1.0, maximize=True)
        message = error_of(lambda: kv.set_optimizer("adam", lr=1.0))
        still_works(kv)
        return message

    assert all("the servers run sgd(" in text and "this worker set adam(" in text for text in job(program))


@pytest.mark.parametrize("store", [store for store in STORES if store != "dist_sync"])
@pytest.mark.parametrize("call", ["push", "pushpull"])
def test_only_lock_step_can_do_without_an_optimizer(store: str, call: str) -> None:
    def program(kv: KVStore) -> str:
        kv.init("good", torch.zeros(3))
        message = error_of(lambda: getattr(kv, call)("good", torch.ones(3)))
        kv.set_optimizer("sgd", lr=1.0, maximize=True)
        kv.barrier()
        still_works(kv)
        return message

    for rank, message in enumerate(job(program, store)):
        assert message.startswith(f"worker {rank}: {store} needs an optimizer on the servers")
        assert "set_optimizer" in message


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("sdg", {}, "unknown optimizer 'sdg'; did you mean 'sgd'. Choose one of sgd, adam, adamw, adagrad, rmsprop"),
        ("lbfgs", {}, "unknown optimizer 'lbfgs'"),
        ("sgd", {"momentun": 0.9}, "optimizer 'sgd': .*momentun"),
        ("sgd", {"lr": -1.0}, "optimizer 'sgd': Invalid learning rate: -1.0"),
        ("adam", {"betas": (0.9, 1.5)}, "optimizer 'adam': Invalid beta"),
        ("sgd", {"nesterov": True}, "optimizer 'sgd': Nesterov momentum requires"),
        ("adam", {"capturable": True}, "capturable=True cannot run on the servers"),
    ],
)
def test_optimizers_by_name_that_cannot_be(name: str, settings: dict[str, Any], words: str) -> None:
    with create("local") as kv:
        kv.init("good", torch.zeros(3))
        with pytest.raises(UsageError, match=words):
            kv.set_optimizer(name, **settings)
        still_works(kv)  # and none was set


@pytest.mark.parametrize(
    ("given", "settings", "words"),
    [
        (torch.optim.SGD, {}, "not the class SGD"),
        (torch.optim.SGD, {"lr": 0.1}, "not the class SGD"),
        (None, {}, "not None"),
        (0.1, {}, "not 0.1"),
        (torch.optim.lr_scheduler.StepLR, {}, "not the class StepLR"),
    ],
)
def test_what_is_no_optimizer_at_all(given: Any, settings: dict[str, Any], words: str) -> None:
    with create("local") as kv:
        kv.init("good", torch.zeros(3))
        message = error_of(lambda: kv.set_optimizer(given, **settings))
        assert message.startswith(
            "set_optimizer takes an optimizer's name and settings ('sgd', lr=0.1), or an instance"
        )
        assert message.endswith(words)
        still_works(kv)  # and none was set


class MySGD(torch.optim.SGD):
    """A subclass: its step may be anything."""


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p: torch.optim.LBFGS(p), "LBFGS cannot run on the servers; use one of SGD, Adam"),
        (lambda p: torch.optim.Adadelta(p), "Adadelta cannot run on the servers"),
        (lambda p: MySGD(p, lr=1.0), "MySGD cannot run on the servers"),
    ],
)
def test_an_optimizer_class_that_cannot_run_on_servers(make: Callable[..., torch.optim.Optimizer], words: str) -> None:
    def program(kv: KVStore) -> str:
        kv.init("good", torch.zeros(3))
        message = error_of(lambda: kv.set_optimizer(make([nn.Parameter(torch.zeros(1))])))
        still_works(kv)
        return message

    assert all(words in text for text in job(program))


def test_settings_go_with_a_name_only() -> None:
    with create("local") as kv, pytest.raises(UsageError, match="an instance has its own"):
        kv.set_optimizer(torch.optim.SGD([nn.Parameter(torch.zeros(1))]), lr=0.5)


def test_an_instance_with_several_groups_needs_to_know_the_keys() -> None:
    parameters = [nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizer = torch.optim.SGD([{"params": parameters[:1], "lr": 1.0}, {"params": parameters[1:], "lr": 2.0}])
    with create("local") as kv, pytest.raises(UsageError, match="2 parameter groups"):
        kv.set_optimizer(optimizer)


@pytest.mark.parametrize("who", ["everybody", "rank 0"])
def test_an_optimizer_does_not_update_whole_numbers(who: str) -> None:
    """Told before anything is sent; and a worker that does not know of the optimizer hears it from the server."""

    def program(kv: KVStore) -> str:
        kv.init("counts", torch.zeros(3, dtype=torch.int64))
        kv.init("good", torch.zeros(3))
        if who == "everybody" or kv.rank == 0:
            kv.set_optimizer("sgd", lr=1.0, maximize=True)
        kv.barrier()
        message = error_of(lambda: kv.pushpull("counts", torch.ones(3, dtype=torch.int64)))
        kv.barrier()
        still_works(kv)
        return message

    for rank, message in enumerate(job(program)):
        assert message.startswith(f"worker {rank}: ")
        assert "key 'counts' is 3 int64: an optimizer cannot update integers" in message


# --- different stores


@pytest.mark.parametrize("transport", [None, SharedMemoryTransport, TcpTransport])
@pytest.mark.parametrize(
    ("ours", "theirs", "words"),
    [
        (("dist_sync", {}), ("dist_async", {}), ("dist_sync()", "dist_async()")),
        (
            ("dist_ssync", {"staleness": 1}),
            ("dist_ssync", {"staleness": 4}),
            ("dist_ssync(staleness=1)", "dist_ssync(staleness=4)"),
        ),
        (
            ("dist_gsync", {"groups": [[0, 1]]}),
            ("dist_gsync", {"groups": [[0], [1]]}),
            ("dist_gsync(groups=[[0, 1]])", "dist_gsync(groups=[[0], [1]])"),
        ),
    ],
)
def test_workers_that_create_different_stores(ours: Any, theirs: Any, words: tuple[str, str], transport: Any) -> None:
    """One store is taken by all servers alike; the worker with the other is out, and the job goes on without it."""
    heard: list[str] = []
    worked: list[int] = []

    def program(kv: KVStore) -> None:
        while kv.num_workers > 1:  # until the view has shrunk to those who agree
            kv.barrier()
        prepared(kv)
        still_works(kv)
        worked.append(kv.rank)

    with pytest.raises(UsageError) as caught:
        run_two(program, ours, theirs, transport() if transport else None)
    heard.append(str(caught.value))
    assert len(worked) == 1
    assert all(word in heard[0] for word in words)
    assert heard[0].startswith(f"worker {1 - worked[0]}: server 0: worker {worked[0]} created ")
    assert "all workers must create the same store" in heard[0]


def run_two(program: Callable[[KVStore], None], ours: Any, theirs: Any, transport: Any) -> None:
    """A job whose two workers ask for different stores; raises the first error."""
    listener = socket.create_server(("127.0.0.1", 0))
    job = Job(scheduler_port=listener.getsockname()[1], num_workers=2, num_servers=2, timeout_s=DEADLINE_S)
    network = transport or InProcessTransport()

    def work(rank: int) -> None:
        name, dials = (ours, theirs)[rank]
        with join(name, job.as_role("worker", rank), network, **dials) as kv:
            program(kv)

    with ThreadPoolExecutor(5) as pool:
        jobs = [pool.submit(serve_scheduler, job, listener)]
        jobs += [pool.submit(serve_server, job.as_role("server", rank), network) for rank in range(2)]
        workers = [pool.submit(work, rank) for rank in range(2)]
    assert [done.result() for done in jobs] == [0, 0, 0]
    for worker in workers:
        worker.result()


# --- after the end


def after_close(folder: Path, kv: KVStore) -> list[str]:
    kv.init("good", torch.zeros(3))
    kv.set_optimizer("sgd", lr=1.0, momentum=0.5)
    kv.barrier()
    kv.close()
    one = torch.ones(3)
    return [
        error_of(lambda: kv.push("good", one)),
        error_of(lambda: kv.pull("good", one)),
        error_of(lambda: kv.pushpull("good", one)),
        error_of(lambda: kv.init("other", one)),
        error_of(lambda: kv.set_optimizer("sgd", lr=1.0, momentum=0.5)),
        error_of(lambda: kv.save_optimizer_states(folder / "states")),
        error_of(lambda: kv.load_optimizer_states(folder / "states")),
        error_of(kv.barrier),
        error_of(kv.retire),
        error_of(lambda: kv.halt("enough")),
    ]


@pytest.mark.parametrize(
    ("runs", "store", "num_workers"),
    [
        (run, "dist_sync", 2),
        (run, "dist_async", 2),
        (forked.run, "dist_sync", 2),
        (forked.run, "nccl", 2),
        (forked.run, "local", 1),
    ],
)
def test_every_call_after_close_is_the_same_error(
    runs: Callable[..., list[list[str]]], store: str, num_workers: int, tmp_path: Path
) -> None:
    found = runs(partial(after_close, tmp_path), store, num_workers=num_workers, timeout_s=DEADLINE_S)
    for rank, heard in enumerate(found):
        closed = f"worker {rank}: this store is closed, and nothing can be asked of it any more"
        assert [text.startswith(closed) for text in heard] == [True] * 10, heard


def test_a_process_that_has_left_its_job_cannot_join_again() -> None:
    """At once: not after the minutes for which a scheduler is waited for that has ended."""
    listener = socket.create_server(("127.0.0.1", 0))
    whole = Job(scheduler_port=listener.getsockname()[1], num_workers=2, num_servers=1, timeout_s=60.0)
    transport = InProcessTransport()

    def come_back(rank: int) -> str:
        join("dist_sync", whole.as_role("worker", rank), transport).close()
        began = time.monotonic()
        said = error_of(lambda: join("dist_sync", whole.as_role("worker", rank), transport))
        assert time.monotonic() - began < DEADLINE_S
        return said

    with ThreadPoolExecutor(4) as pool:
        pool.submit(serve_scheduler, whole, listener)
        pool.submit(serve_server, whole.as_role("server", 0), transport)
        heard = [job.result() for job in [pool.submit(come_back, rank) for rank in range(2)]]
    for said in (*heard, come_back_later(whole, transport)):
        assert f"this process has left the job of 127.0.0.1:{whole.scheduler_port}" in said
        assert "create one store, give it to every Trainer (kvstore=store)" in said


def come_back_later(whole: Job, transport: InProcessTransport) -> str:
    """When the scheduler has ended for certain."""
    return error_of(lambda: join("dist_sync", whole.as_role("worker", 0), transport))


# --- states


def test_states_are_not_saved_where_no_file_can_be(tmp_path: Path) -> None:
    with create("local") as kv:
        kv.init("good", torch.zeros(3))
        kv.set_optimizer("sgd", lr=1.0, momentum=0.5)
        kv.push("good", torch.ones(3))
        said = error_of(lambda: kv.save_optimizer_states(tmp_path))
        assert f"cannot write {tmp_path}: it is a folder; give a file name" in said
        missing = tmp_path / "nowhere" / "states"
        said = error_of(lambda: kv.save_optimizer_states(missing))
        assert f"cannot write {missing}: the folder {missing.parent} does not exist; create it" in said
    assert list(tmp_path.iterdir()) == []


def test_states_need_an_optimizer_and_a_file_of_theirs(tmp_path: Path) -> None:
    file, other = tmp_path / "states", tmp_path / "other"
    other.write_bytes(b"these are no states")

    def errors(kv: KVStore) -> list[str]:
        heard = []
        for call in (kv.save_optimizer_states, kv.load_optimizer_states):
            heard.append(error_of(lambda call=call: call(file)))  # type: ignore[misc]
        return heard

    with create("local") as kv:
        kv.init("good", torch.zeros(3))
        assert all("there is no optimizer on the servers; call set_optimizer first" in text for text in errors(kv))
        assert not file.exists()
        kv.set_optimizer("sgd", lr=1.0, momentum=0.5, maximize=True)
        for bad in (other, tmp_path / "nowhere"):
            with pytest.raises(DataError, match=str(bad)):
                kv.load_optimizer_states(bad)
        still_works(kv)  # a key that was never updated has no state
        kv.save_optimizer_states(file)
    for name, settings, keys, words in (
        ("adam", {}, {"good": 3}, "has states of sgd; the servers run adam"),
        ("sgd", {"momentum": 0.0}, {"good": 3}, "do not fit"),
        ("sgd", {"momentum": 0.5}, {"other": 3}, "which this job does not have"),
        ("sgd", {"momentum": 0.5}, {"good": 4}, "has 3 elements, the key has 4"),
    ):
        with create("local") as kv:
            for key, length in keys.items():
                kv.init(key, torch.zeros(length))
            kv.set_optimizer(name, **settings)
            with pytest.raises(EchelonError, match=words):
                kv.load_optimizer_states(file)
