"""Several processes resume from checkpoints: all from the same epoch, whichever rank's file is damaged."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from multi_device_jobs import run_as_launched
from plain_loops import assert_same_bits

from echelon.environment import Job
from echelon.errors import DataError
from echelon.train.checkpoint.format import load
from echelon.train.checkpoint.names import path_for
from echelon.train.loop.fit import fit
from echelon.train.recipe.options import TrainOptions
from forked import Fork

pytestmark = pytest.mark.numeric

# A network with BatchNorm, so that every process has its own statistics.
OPTIONS = TrainOptions(
    network="resnet",
    num_layers=8,
    benchmark=True,
    image_shape=(3, 8, 8),
    num_classes=10,
    num_examples=64,
    batch_size=8,
    num_epochs=3,
)


def run_on_devices(program: Callable[[], Any], size: int) -> list[Any]:
    """Run `program` on the devices of one worker, without servers."""

    def work(index: int, port: int, *listener: socket.socket) -> Any:
        fd = listener[0].detach() if listener else None
        job = Job(num_devices=size, device_index=index, device_port=port, device_fd=fd, timeout_s=60.0)
        os.environ.update(job.to_environment())
        if fd is not None:
            os.environ["ECHELON_DEVICE_FD"] = str(fd)
        return program()

    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        port = listener.getsockname()[1]
        forks = [Fork(work, index, port, sockets=[] if index else [listener]) for index in range(size)]
    return [fork.result() for fork in forks]


def trained(options: TrainOptions, num_workers: int) -> list[Any]:
    """Return, for every process, its status and its warnings, or the error that ended it."""

    def program() -> tuple[int, list[str]]:
        warned: list[str] = []
        handler = logging.Handler(logging.WARNING)
        handler.emit = lambda record: warned.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("echelon").addHandler(handler)
        return fit(options), warned

    if options.kv_store == "device":
        return run_on_devices(program, len(options.devices))
    return run_as_launched(program, (num_workers, len(options.devices), 1))


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("store", "num_workers", "num_devices"), [("device", 1, 2), ("dist_sync", 2, 1), ("dist_sync", 2, 2)]
)
def test_all_resume_from_the_newest_epoch_that_is_intact_on_all(
    tmp_path: Path, store: str, num_workers: int, num_devices: int
) -> None:
    prefix, size = tmp_path / "m", num_workers * num_devices
    options = replace(OPTIONS, kv_store=store, devices=("cpu",) * num_devices, model_prefix=str(prefix))
    ranks = range(size)
    assert trained(options, num_workers) == [(0, [])] * size
    whole = [load(path_for(prefix, rank, 3)) for rank in ranks]
    bad = path_for(prefix, size - 1, 3)
    damage(bad)
    damage(path_for(prefix, 0, 2))
    for status, warned in trained(replace(options, resume=True), num_workers):
        assert status == 0
        assert len(warned) == 2
        assert f"{bad} is damaged" in warned[0]
        assert f"{path_for(prefix, 0, 2)} is damaged" in warned[1]
    for rank in ranks:
        assert_same_bits(load(path_for(prefix, rank, 3)).weights, whole[rank].weights)


def test_a_damaged_epoch_that_was_requested_is_rejected_by_all(tmp_path: Path) -> None:
    options = replace(OPTIONS, kv_store="device", devices=("cpu", "cpu"), model_prefix=str(tmp_path / "m"))
    trained(replace(options, num_epochs=1), 1)
    damage(path_for(tmp_path / "m", 1, 1))
    first, second = trained(replace(options, load_epoch=1), 1)
    assert isinstance(first, DataError)
    assert str(first) == str(second)
    assert "m-1-0001.safetensors is damaged" in str(first)
