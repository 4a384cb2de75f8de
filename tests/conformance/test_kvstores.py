"""The conformance suite on every store over every transport, GSP weights by hand, and broken stores that it detects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import forked
from echelon.kvstore import KVStore, create
from echelon.launch.threads.in_process import run
from echelon.testing import check_kvstore, kvstore_calls, kvstore_updates
from echelon.testing.kvstore import CHECKS, Check
from echelon.testing.trial import Trial
from echelon.transport.in_process import InProcessTransport
from echelon.transport.interface import Transport
from echelon.transport.shared_memory import SharedMemoryTransport
from echelon.transport.sockets import TcpTransport

pytestmark = pytest.mark.numeric

WORKERS = 3
TRANSPORTS = [InProcessTransport, SharedMemoryTransport, TcpTransport]
OPTIONS: dict[str, dict[str, Any]] = {
    "dist_sync": {},
    "dist_async": {},
    "dist_ssync": {"staleness": 2},
    "dist_gsync": {"groups": [list(range(WORKERS))]},
}


@pytest.fixture(autouse=True)
def _one_thread() -> object:
    """Let torch use one thread, because workers and servers share two cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run_alone(program: Callable[[KVStore], Any], store: str, **options: Any) -> list[Any]:
    """Run a program on one worker, without servers and torch.distributed."""
    with create(store, check_finite=options.get("check_finite", False)) as kv:
        return [program(kv)]


@pytest.mark.parametrize("store", ["local", "nccl"])
def test_a_store_of_one_process(store: str) -> None:
    check_kvstore(run_alone, store, num_workers=1)


@pytest.mark.parametrize("store", ["dist_device_sync", pytest.param("nccl", marks=pytest.mark.long)])
def test_collective_store(store: str) -> None:
    """Real processes with Gloo and without servers. With nccl each updates its part, else each updates everything."""
    check_kvstore(forked.run, store, num_workers=WORKERS, num_servers=0)


@pytest.mark.parametrize("store", ["nccl_allreduce", "local", "device", "dist_sync_device", "dist_sync"])
def test_other_names_of_the_same_store(store: str) -> None:
    """They differ from dist_device_sync in name and in the place of their rendezvous."""
    for check in (kvstore_calls.each_worker_has_its_rank, kvstore_updates.updates_add_up_over_rounds):
        check(Trial(forked.run, store, 2, 0))


@pytest.mark.parametrize("store", OPTIONS)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_dist_store(transport: type[Transport], store: str) -> None:
    def over_transport(program: Callable[[KVStore], Any], store: str, **options: Any) -> list[Any]:
        return run(program, store, transport=transport(), **options)

    check_kvstore(over_transport, store, num_workers=WORKERS, **OPTIONS[store])


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_gsp_divides_a_step_by_its_staleness(transport: type[Transport]) -> None:
    """Barriers let the groups take turns, so that each gamma = V - V_g + 1 is known."""

    def program(kv: KVStore) -> list[float]:
        kv.init("w", torch.zeros(1))
        kv.set_optimizer("sgd", lr=1.0, maximize=True)
        seen = []
        out = torch.empty(1)
        for turn in (0, 1, 1, 0):
            if kv.rank in ((0, 1), (2,))[turn]:
                kv.push("w", torch.full((1,), 12.0))
                kv.pull("w", out)
            kv.barrier()
            kv.pull("w", out)
            seen.append(float(out))
            kv.barrier()
        return seen

    # V: 0 -> gamma 1 for the pair (24); 1, V_g 0 -> 2 (6); then 2 - 2 + 1 = 1 (12); then 3 - 1 + 1 = 3 (8)
    expected = [24.0, 30.0, 42.0, 50.0]
    assert run(program, "dist_gsync", num_workers=3, groups=[[0, 1], [2]], transport=transport()) == [expected] * 3


# --- the suite detects broken stores


class _Broken:
    """A store with one defect."""

    def __init__(self, kv: KVStore) -> None:
        self.kv = kv

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kv, name)


class Averages(_Broken):
    def push(self, key: Any, value: Any, priority: int = 0) -> None:
        scaled = [v / self.kv.num_workers if isinstance(v, torch.Tensor) else v for v in value]
        self.kv.push(key, scaled if isinstance(value, list) else value / self.kv.num_workers, priority)


class DoesNotWait(_Broken):
    def barrier(self) -> None:
        pass


class InitsWithOwnValues(_Broken):
    def pull(self, key: Any, out: Any, priority: int = 0) -> None:
        self.kv.pull(key, out, priority)
        for tensor in [out] if isinstance(out, torch.Tensor) else []:
            tensor += self.kv.rank


class AcceptsAnyShape(_Broken):
    def push(self, key: Any, value: Any, priority: int = 0) -> None:
        if isinstance(value, torch.Tensor) and key == "k":
            value = value.reshape(-1)[:1].expand(6).view(2, 3).float()
        self.kv.push(key, value, priority)


class LosesStates(_Broken):
    def load_optimizer_states(self, path: Any) -> None:
        pass


@pytest.mark.parametrize(
    ("broken", "check", "what"),
    [
        (Averages, kvstore_calls.push_replaces_the_value_with_the_sum, "pushed ones"),
        (DoesNotWait, kvstore_calls.barrier_waits_for_all_workers, "no worker leaves before the last one arrives"),
        (InitsWithOwnValues, kvstore_calls.pull_before_push_returns_the_initial_value, "key 3"),
        (AcceptsAnyShape, kvstore_calls.a_rejected_call_changes_nothing, "push of another shape"),
        (LosesStates, kvstore_updates.optimizer_states_can_be_saved_and_loaded, "100003 elements on 2 servers"),
    ],
)
def test_a_broken_store_is_detected(broken: type[_Broken], check: Check, what: str) -> None:
    def broken_run(program: Callable[[KVStore], Any], store: str, **options: Any) -> list[Any]:
        return run(lambda kv: program(broken(kv)), store, **options)  # type: ignore[arg-type]

    assert check in CHECKS
    with pytest.raises(AssertionError, match=what):
        check(Trial(broken_run, "dist_sync", 2, 2))
