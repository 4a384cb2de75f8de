"""The table of store names."""

from __future__ import annotations

from typing import Any

import pytest

from echelon.errors import UsageError
from echelon.schemes import SCHEMES, STORES, rules_for, store_kind
from echelon.schemes.stores import Use, stores_with

GIVEN = {Use.REQUIRED: True, Use.OPTIONAL: False, Use.NEVER: False}


def names(**wanted: bool) -> set[str]:
    return {kind.name for kind in STORES.values() if all(getattr(kind, f) == value for f, value in wanted.items())}


def test_each_name_is_in_the_table_once() -> None:
    assert list(STORES) == [
        *("local", "device", "nccl_allreduce", "nccl"),
        *("dist_sync", "dist_async", "dist_ssync", "dist_gsync"),
        *("dist_device_sync", "dist_sync_device"),
    ]
    assert all(store_kind(name).name == name for name in STORES)


def test_what_the_names_mean() -> None:
    assert names(spans_workers=False) == {"local", "device", "nccl_allreduce", "nccl"}
    assert names(lock_step=False) == {"dist_async", "dist_ssync", "dist_gsync"} == names(needs_servers=True)
    assert names(takes_staleness=True) == {"dist_ssync", "dist_gsync"}
    assert names(takes_groups=True) == {"dist_gsync"}
    assert SCHEMES == {"dist_sync": "BSP", "dist_async": "ASP", "dist_ssync": "SSP", "dist_gsync": "GSP"}


@pytest.mark.parametrize("setting", ["staleness", "groups"])
def test_the_stores_with_a_setting_are_those_that_take_it(setting: str) -> None:
    assert set(stores_with(setting)) == names(**{f"takes_{setting}": True})


def test_an_error_names_the_stores_that_take_the_setting() -> None:
    with pytest.raises(UsageError, match="staleness=3 was given; use dist_ssync or dist_gsync for it"):
        rules_for("dist_async", 3, None)
    with pytest.raises(UsageError, match=r"groups=\[\[0\]\] was given; use dist_gsync for it"):
        rules_for("dist_async", None, [[0]])


@pytest.mark.parametrize("name", STORES)
def test_dist_sync_is_a_collective_only_in_a_job_without_servers(name: str) -> None:
    kind = store_kind(name)
    assert kind.is_collective(2) == kind.collective == (name not in SCHEMES)
    assert kind.is_collective(0) == (kind.collective or name == "dist_sync")


@pytest.mark.parametrize("name", SCHEMES)
def test_the_rules_of_a_store_agree_with_the_table(name: str) -> None:
    kind = store_kind(name)
    rules = rules_for(name, 3 if GIVEN[kind.staleness] else None, [[0, 1], [2]] if GIVEN[kind.groups] else None)
    assert rules.name == kind.scheme
    assert rules.sums_over_everybody == kind.lock_step


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("local_update_cpu", "local"),
        ("local_allreduce_cpu", "local"),
        ("local_allreduce_device", "device"),
        ("dist", "dist_sync"),
        ("dist_async_device", "dist_async"),
        ("Dist_Device_ASYNC", "dist_async"),
        ("NCCL", "nccl"),
    ],
)
def test_other_names_that_mxnet_accepts(name: str, meant: str) -> None:
    assert store_kind(name) is STORES[meant]


def test_a_typo_in_another_name_is_refused_with_that_name() -> None:
    with pytest.raises(UsageError, match="'local_alreduce_cpu'; did you mean 'local_allreduce_cpu'"):
        store_kind("local_alreduce_cpu")


@pytest.mark.parametrize(
    ("name", "meant"),
    [("dist_synk", "dist_sync"), ("dist-async", "dist_async"), ("dist_gsynch", "dist_gsync"), ("Locla", "local")],
)
def test_an_unknown_name_raises_with_the_nearest_name(name: str, meant: str) -> None:
    with pytest.raises(UsageError) as caught:
        store_kind(name)
    assert str(caught.value) == f"unknown store {name!r}; did you mean {meant!r}? Choose one of {', '.join(STORES)}"


def test_an_unknown_name_that_is_like_no_other_raises_with_the_list() -> None:
    with pytest.raises(UsageError) as caught:
        store_kind("zzz")
    assert str(caught.value) == f"unknown store 'zzz'; choose one of {', '.join(STORES)}"


@pytest.mark.parametrize("name", [None, 3, ["local"]])
def test_a_name_that_is_not_a_string_raises(name: Any) -> None:
    with pytest.raises(UsageError, match="the name of a store must be a string, not"):
        store_kind(name)
