"""NaN in a push: the servers name the worker, key and clock, and the job does not end with status 0."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import echelon
from echelon.environment import Job
from echelon.errors import NOT_WHOLE
from echelon.kvstore import KVStore, create
from echelon.launch.threads.in_process import JobThreads
from echelon.transport.admission.credentials import with_credentials
from echelon.transport.in_process import InProcessTransport
from echelon.transport.listening import LOOPBACK, listen


def status_of(store: str, program: Callable[[KVStore], None]) -> int:
    """Run a job of two workers and two servers as threads; return the status of its scheduler."""
    listener = listen(LOOPBACK)
    job = with_credentials(Job(scheduler_port=listener.getsockname()[1], num_workers=2, num_servers=2, timeout_s=60))
    threads = JobThreads(job, listener, InProcessTransport(), lambda own: program(create(store)))
    threads.start()
    assert threads.join(120)
    assert threads.errors == {}
    return threads.scheduler_status


def train(kv: KVStore, *, bad_at: int | None, recovers: bool = False, update_on_kvstore: bool = True) -> None:
    """Make six steps; worker 1's batch of step `bad_at` has NaN."""
    model = nn.Linear(4, 3)
    trainer = echelon.Trainer(
        model, torch.optim.SGD(model.parameters(), lr=0.1), kv, update_on_kvstore=update_on_kvstore
    )
    good = {name: value.detach().clone() for name, value in model.state_dict().items()}
    for step in range(6):
        batch = torch.ones(2, 4) * (torch.nan if kv.rank == 1 and step == bad_at else 1.0)
        model.zero_grad()
        model(batch).sum().backward()
        trainer.step(2)
        if recovers and step == bad_at:
            trainer.load_weights(good)
    trainer.close()


@pytest.mark.parametrize("store", ["dist_sync", "dist_async"])
def test_the_push_that_brings_nan_is_named_and_the_status_says_so(
    store: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status_of(store, lambda kv: train(kv, bad_at=3)) == NOT_WHOLE
    printed = capsys.readouterr().err
    named = "key 'weight' of store 0 has NaN or infinity, since clock 3, because worker 1 pushed it"
    assert f"server 0: {named}" in printed
    assert f"the result is not whole: {named}" in printed


def test_a_finite_run_has_status_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of("dist_sync", lambda kv: train(kv, bad_at=None)) == 0
    assert "NaN" not in capsys.readouterr().err


def test_a_run_that_loads_finite_weights_after_nan_has_status_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of("dist_sync", lambda kv: train(kv, bad_at=2, recovers=True)) == 0
    assert "since clock 2, because worker 1 pushed it" in capsys.readouterr().err


def test_workers_that_update_themselves_say_that_their_weights_have_nan(capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of("dist_sync", lambda kv: train(kv, bad_at=3, update_on_kvstore=False)) == NOT_WHOLE
    assert "1 of 2 weights have NaN or infinity, for example 'weight'" in capsys.readouterr().err


def test_plain_values_may_be_infinite(capsys: pytest.CaptureFixture[str]) -> None:
    """Without an optimizer the servers only sum, and a worker may exchange any values."""

    def program(kv: KVStore) -> None:
        kv.init("lowest", torch.zeros(2))
        kv.push("lowest", torch.full((2,), torch.inf))
        out = torch.empty(2)
        kv.pull("lowest", out)
        assert out.isinf().all()

    assert status_of("dist_sync", program) == 0
    assert "infinity" not in capsys.readouterr().err


def test_gradients_that_overflow_with_loss_scaling_are_skipped_and_not_reported(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def program(kv: KVStore) -> None:
        model = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = echelon.Trainer(model, optimizer, kv)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
        for _ in range(4):
            optimizer.zero_grad()
            scaler.scale(model(torch.full((2, 4), 100.0)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() < 2.0**127, "no step was skipped"
        assert model.weight.isfinite().all()
        trainer.close()

    assert status_of("dist_sync", program) == 0
    assert "infinity" not in capsys.readouterr().err
