"""Errors about optimizers and their states: their messages, and that the job continues after each of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from error_jobs import STORES, check_still_works, error_of, prepare, run_job
from torch import nn

from echelon.errors import DataError, EchelonError, UsageError
from echelon.kvstore import KVStore, create
from echelon.transport.shared_memory import SharedMemoryTransport
from echelon.transport.sockets import TcpTransport


@pytest.mark.parametrize("transport", [None, SharedMemoryTransport, TcpTransport])
def test_workers_that_set_different_optimizers(transport: Any) -> None:
    """All servers take the same one. The other worker gets an error that shows both, and can then set the same."""

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

    for _ in range(5):  # which worker is first is a race; everything else holds for both
        messages = run_job(program, transport=transport() if transport else None)
        assert sorted(map(bool, messages)) == [False, True], messages
        rank = 0 if messages[0] else 1
        assert messages[rank].startswith(f"worker {rank}: server 0: the servers run sgd(")
        theirs, own = messages[rank].split(", but this worker set sgd(")
        assert f"lr={(4.0, 1.0)[rank]}" in theirs
        assert f"lr={(1.0, 4.0)[rank]}" in own


def test_a_second_optimizer_is_rejected() -> None:
    def program(kv: KVStore) -> str:
        prepare(kv)
        kv.set_optimizer("sgd", lr=1.0, maximize=True)
        message = error_of(lambda: kv.set_optimizer("adam", lr=1.0))
        check_still_works(kv)
        return message

    assert all("the servers run sgd(" in text and "this worker set adam(" in text for text in run_job(program))


@pytest.mark.parametrize("store", [store for store in STORES if store != "dist_sync"])
@pytest.mark.parametrize("call", ["push", "pushpull"])
def test_only_lock_step_works_without_an_optimizer(store: str, call: str) -> None:
    def program(kv: KVStore) -> str:
        kv.init("good", torch.zeros(3))
        message = error_of(lambda: getattr(kv, call)("good", torch.ones(3)))
        kv.set_optimizer("sgd", lr=1.0, maximize=True)
        kv.barrier()
        check_still_works(kv)
        return message

    for rank, message in enumerate(run_job(program, store)):
        assert message.startswith(f"worker {rank}: {store} needs an optimizer on the servers")
        assert "set_optimizer" in message


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("sdg", {}, "unknown optimizer 'sdg'; did you mean 'sgd'. Choose one of sgd, adam, adamw, adagrad, rmsprop"),
        ("lbfgs", {}, "LBFGS cannot run on the servers: a step evaluates the loss several times"),
        ("sgd", {"momentun": 0.9}, "optimizer 'sgd': .*momentun"),
        ("sgd", {"lr": -1.0}, "optimizer 'sgd': Invalid learning rate: -1.0"),
        ("adam", {"betas": (0.9, 1.5)}, "optimizer 'adam': Invalid beta"),
        ("sgd", {"nesterov": True}, "optimizer 'sgd': Nesterov momentum requires"),
        ("adam", {"capturable": True}, "capturable=True cannot run on the servers"),
    ],
)
def test_invalid_optimizers_by_name(name: str, settings: dict[str, Any], words: str) -> None:
    with create("local") as kv:
        kv.init("good", torch.zeros(3))
        with pytest.raises(UsageError, match=words):
            kv.set_optimizer(name, **settings)
        check_still_works(kv)  # no optimizer was set


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
def test_an_argument_that_is_not_an_optimizer(given: Any, settings: dict[str, Any], words: str) -> None:
    with create("local") as kv:
        kv.init("good", torch.zeros(3))
        message = error_of(lambda: kv.set_optimizer(given, **settings))
        assert message.startswith(
            "set_optimizer takes an optimizer's name and settings ('sgd', lr=0.1), or an instance"
        )
        assert message.endswith(words)
        check_still_works(kv)  # no optimizer was set


class MySGD(torch.optim.SGD):
    """A subclass, whose `step` may do anything."""


def own_class() -> type[torch.optim.SGD]:
    """Return a class that no other process can import."""

    class LocalSGD(torch.optim.SGD):
        pass

    return LocalSGD


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p: torch.optim.LBFGS(p), "LBFGS cannot run on the servers: a step evaluates the loss several times"),
        (
            lambda p: MySGD(p, lr=1.0),
            f"the optimizer {__name__}:MySGD is not allowed on the servers: start the job with --allow-optimizer "
            f"{__name__}:MySGD",
        ),
        (
            lambda p: own_class()(p, lr=1.0),
            "the servers cannot import LocalSGD, because it is defined inside a function: move it to a module, for "
            "example optimizers.py, and start the job with --allow-optimizer optimizers:LocalSGD. "
            "Trainer(update_on_kvstore=False) with dist_sync, or a store without servers, runs any class",
        ),
    ],
)
def test_an_optimizer_class_that_cannot_run_on_servers(make: Callable[..., torch.optim.Optimizer], words: str) -> None:
    def program(kv: KVStore) -> str:
        kv.init("good", torch.zeros(3))
        message = error_of(lambda: kv.set_optimizer(make([nn.Parameter(torch.zeros(1))])))
        check_still_works(kv)
        return message

    texts = run_job(program)
    assert all(words in text for text in texts), texts


def test_settings_are_only_for_an_optimizer_name() -> None:
    with create("local") as kv, pytest.raises(UsageError, match="an optimizer instance has its own settings"):
        kv.set_optimizer(torch.optim.SGD([nn.Parameter(torch.zeros(1))]), lr=0.5)


def test_an_instance_with_several_parameter_groups_is_rejected() -> None:
    parameters = [nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizer = torch.optim.SGD([{"params": parameters[:1], "lr": 1.0}, {"params": parameters[1:], "lr": 2.0}])
    with create("local") as kv, pytest.raises(UsageError, match="2 parameter groups"):
        kv.set_optimizer(optimizer)


@pytest.mark.parametrize("setters", ["all", "rank 0"])
def test_an_optimizer_does_not_update_integers(setters: str) -> None:
    """The error comes before anything is sent or, on a worker that has set no optimizer, from the server."""

    def program(kv: KVStore) -> str:
        kv.init("counts", torch.zeros(3, dtype=torch.int64))
        kv.init("good", torch.zeros(3))
        if setters == "all" or kv.rank == 0:
            kv.set_optimizer("sgd", lr=1.0, maximize=True)
        kv.barrier()
        message = error_of(lambda: kv.pushpull("counts", torch.ones(3, dtype=torch.int64)))
        kv.barrier()
        check_still_works(kv)
        return message

    for rank, message in enumerate(run_job(program)):
        assert message.startswith(f"worker {rank}: ")
        assert "key 'counts' is 3 int64: an optimizer cannot update integers" in message


def test_states_are_not_saved_where_no_file_can_be_created(tmp_path: Path) -> None:
    with create("local") as kv:
        kv.init("good", torch.zeros(3))
        kv.set_optimizer("sgd", lr=1.0, momentum=0.5)
        kv.push("good", torch.ones(3))
        message = error_of(lambda: kv.save_optimizer_states(tmp_path))
        assert f"cannot write {tmp_path}: it is a folder; give a file name" in message
        missing = tmp_path / "nowhere" / "states"
        message = error_of(lambda: kv.save_optimizer_states(missing))
        assert f"cannot write {missing}: the folder {missing.parent} does not exist; create it" in message
    assert list(tmp_path.iterdir()) == []


def test_states_need_an_optimizer_and_a_file_of_states(tmp_path: Path) -> None:
    file, other = tmp_path / "states", tmp_path / "other"
    other.write_bytes(b"these are not states")

    def errors(kv: KVStore) -> list[str]:
        messages = []
        for call in (kv.save_optimizer_states, kv.load_optimizer_states):
            messages.append(error_of(lambda call=call: call(file)))  # type: ignore[misc]
        return messages

    with create("local") as kv:
        kv.init("good", torch.zeros(3))
        assert all("the store has no optimizer; call set_optimizer first" in text for text in errors(kv))
        assert not file.exists()
        kv.set_optimizer("sgd", lr=1.0, momentum=0.5, maximize=True)
        for bad in (other, tmp_path / "nowhere"):
            with pytest.raises(DataError, match=str(bad)):
                kv.load_optimizer_states(bad)
        check_still_works(kv)  # a key that was never updated has no state
        kv.save_optimizer_states(file)
    for name, settings, keys, words in (
        ("adam", {}, {"good": 3}, "has states of sgd; the servers run adam"),
        ("sgd", {"momentum": 0.5}, {"other": 3}, "which this job does not have"),
        ("sgd", {"momentum": 0.5}, {"good": 4}, "has 3 elements, the key has 4"),
    ):
        with create("local") as kv:
            for key, length in keys.items():
                kv.init(key, torch.zeros(length))
            kv.set_optimizer(name, style="torch", **settings)
            with pytest.raises(EchelonError, match=words):
                kv.load_optimizer_states(file)
