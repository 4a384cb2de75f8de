"""The store of a job whose user named none, and the flags of the demonstration."""

from __future__ import annotations

import logging

import pytest

from echelon.cli.train import add_flags, as_demo
from echelon.environment import Job
from echelon.errors import UsageError
from echelon.kvstore.create import create
from echelon.schemes.stores import STORES
from echelon.train.flags.parser import Parser
from echelon.train.flags.stores import choose_store, describe_store

PARSER = Parser()
add_flags(PARSER)


@pytest.mark.parametrize("default", ["local", "device"])
def test_several_workers_train_one_model_by_default(default: str) -> None:
    store, reason = choose_store(default, named=False, num_workers=2)
    assert store == "dist_sync"
    assert reason == f"using --kv-store dist_sync: the default, {default}, would train 2 independent models"


def test_asking_for_servers_uses_them() -> None:
    assert choose_store("local", named=False, num_workers=1, wants_servers=True)[0] == "dist_sync"


@pytest.mark.parametrize(
    ("name", "named", "num_workers"), [("device", True, 2), ("local", False, 1), ("dist_async", False, 2)]
)
def test_the_store_is_kept(name: str, named: bool, num_workers: int) -> None:
    assert choose_store(name, named=named, num_workers=num_workers) == (name, "")


@pytest.mark.parametrize(("rank", "warnings"), [(0, 1), (1, 0)])
def test_a_store_of_one_worker_in_a_job_of_several_gets_one_warning(
    caplog: pytest.LogCaptureFixture, rank: int, warnings: int
) -> None:
    with caplog.at_level(logging.WARNING), create("local", job=Job(num_workers=2, scheduler_port=1, rank=rank)):
        pass
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "the store local does not synchronize workers"
    ] * warnings


def test_each_store_is_described_with_the_flags_it_needs() -> None:
    assert "needs --staleness" in describe_store(STORES["dist_ssync"])
    assert "needs --groups; --staleness is optional" in describe_store(STORES["dist_gsync"])
    assert "without servers" in describe_store(STORES["dist_device_sync"])


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", (4, 2, "dist_gsync", "0,1,2/3", "3:3", 16)),
        ("-n 2", (2, 2, "dist_gsync", "0/1", "1:3", 16)),
        ("-n 1", (1, 2, "dist_gsync", "0", "0:3", 16)),
        ("-s 1 --num-epochs 2", (4, 1, "dist_gsync", "0,1,2/3", "3:3", 2)),
        ("--kv-store dist_sync", (4, 2, "dist_sync", None, "3:3", 16)),
        ("--slow 0:2 --groups 0/1,2,3", (4, 2, "dist_gsync", "0/1,2,3", "0:2", 16)),
    ],
)
def test_the_demonstration_obeys_the_flags(flags: str, expected: tuple[object, ...]) -> None:
    demo = as_demo(PARSER.parse_args(["--demo", *flags.split()]))
    assert (demo.num_workers, demo.num_servers, demo.kv_store, demo.groups, demo.slow, demo.num_epochs) == expected


def test_the_demonstration_rejects_an_unknown_store() -> None:
    with pytest.raises(UsageError, match=r"unknown store 'dist_snyc'; did you mean 'dist_sync'?"):
        as_demo(PARSER.parse_args(["--demo", "--kv-store", "dist_snyc"]))
