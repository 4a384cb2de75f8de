"""Checkpoint files: names, the newest valid one, pruning, and crashes while saving."""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import nn

from echelon.data.images.config import AugmentConfig
from echelon.data.sets.datasets import Dataset
from echelon.errors import DataError, UsageError
from echelon.train.checkpoint.format import Checkpoint, Image, load, save
from echelon.train.checkpoint.names import find, load_at, load_newest, path_for, prune
from echelon.train.checkpoint.saver import RunPosition, Saver, capture_rng, restore_rng
from echelon.train.recipe.options import TrainOptions
from echelon.train.recipe.plan import ProcessRank
from echelon.train.trainer import Trainer
from forked import Fork


def checkpoint(value: float) -> Checkpoint:
    return Checkpoint({"w": torch.full((4,), value)}, metadata={"value": value})


def write(prefix: Path, *points: tuple[int, int, int]) -> None:
    """Save checkpoints of (rank, epoch, samples), each with a value of its own."""
    for rank, epoch, samples in points:
        save(path_for(prefix, rank, epoch, samples), checkpoint(rank * 10_000 + epoch * 100 + samples))


def write_branch(prefix: Path, branch: int, *points: tuple[int, int]) -> None:
    """Save checkpoints of (epoch, samples) of rank 0 in a branch."""
    for epoch, samples in points:
        save(path_for(prefix, 0, epoch, samples), Checkpoint({}, metadata={"branch": branch}))


def flip(path: Path, at: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_names() -> None:
    assert path_for("a/x", 0, 12) == Path("a/x-0012.safetensors")
    assert path_for("a/x", 3, 12) == Path("a/x-3-0012.safetensors")
    assert path_for("a/x", 0, 12, 345) == Path("a/x-0012-s0000345.safetensors")
    assert path_for("a/x", 3, 12, 0) == Path("a/x-3-0012.safetensors")
    assert path_for("x", 0, 12345, 67890123) == Path("x-12345-s67890123.safetensors")
    with pytest.raises(UsageError, match="rank 0, epoch -1"):
        path_for("x", 0, -1)


def test_find_sorts_by_epoch_and_samples_and_ignores_other_files(tmp_path: Path) -> None:
    prefix = tmp_path / "x"
    write(prefix, (0, 9999, 7), (0, 10000, 0), (0, 9999, 0), (0, 0, 12), (1, 3, 0), (12, 3, 4))
    for stranger in (
        "x-0001.params",
        "y-0001.safetensors",
        "x-012.safetensors",
        "x-00012.safetensors",
        "x-0001-s00000001.safetensors",
    ):
        (tmp_path / stranger).touch()
    assert [one.position for one in find(prefix)] == [(10000, 0), (9999, 7), (9999, 0), (0, 12)]
    assert [one.position for one in find(prefix, 12)] == [(3, 4)]
    assert find(prefix, 1)[0].path == path_for(prefix, 1, 3)
    assert find(tmp_path / "nowhere" / "x") == []


def test_the_newest_valid_file_is_loaded_and_damaged_ones_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prefix = tmp_path / "x"
    write(prefix, (0, 1, 0), (0, 2, 0), (0, 2, 5))
    flip(path_for(prefix, 0, 2, 5))
    os.truncate(path_for(prefix, 0, 2), 40)
    with caplog.at_level(logging.WARNING):
        found = load_newest(prefix)
    assert found is not None
    assert found.own is found.rank_0
    assert (found.own.metadata["value"], found.path) == (100, path_for(prefix, 0, 1))
    first, second = (record.getMessage() for record in caplog.records)
    assert "x-0002-s0000005.safetensors is damaged: the digest of tensor 'weights/w'" in first
    assert "x-0002.safetensors is damaged: it is cut off at 40 bytes" in second


def test_if_all_checkpoints_are_damaged_all_are_named_and_nothing_is_loaded(tmp_path: Path) -> None:
    prefix = tmp_path / "x"
    write(prefix, (0, 1, 0), (0, 2, 0), (0, 2, 5))
    flip(path_for(prefix, 0, 2, 5))
    os.truncate(path_for(prefix, 0, 2), 40)
    flip(path_for(prefix, 0, 1))
    with pytest.raises(DataError, match="none of the 3 checkpoints") as raised:
        load_newest(prefix)
    assert [name in str(raised.value) for name in names(tmp_path)] == [True] * 3
    assert load_newest(tmp_path / "nothing") is None


def test_all_ranks_load_the_same_position_and_each_its_own_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prefix = tmp_path / "x"
    write(prefix, *((rank, epoch, 0) for rank in range(3) for epoch in (1, 2, 3)), (0, 4, 0), (1, 4, 0))
    for rank, epoch in ((1, 3), (2, 3), (1, 4)):
        flip(path_for(prefix, rank, epoch))
    for rank in range(3):
        caplog.clear()
        found = load_newest(prefix, rank, 3)
        assert found is not None
        assert (found.path, found.rank_0.metadata["value"]) == (path_for(prefix, 0, 2), 200)
        assert found.own.metadata["value"] == rank * 10_000 + 200
        newest, older = caplog.messages
        assert "x-1-0004.safetensors is damaged" in newest
        assert "x-1-0003.safetensors is damaged" in older
        assert "x-2-0003.safetensors is damaged" in older
    flip(path_for(prefix, 2, 2))
    flip(path_for(prefix, 0, 1))
    with pytest.raises(DataError, match=r"none of the 4 checkpoints .*x-2-0002\.safetensors is damaged"):
        load_newest(prefix, 0, 3)


def test_rank_0s_file_is_used_by_a_rank_without_a_file_and_after_a_change_of_size(tmp_path: Path) -> None:
    prefix = tmp_path / "x"
    save(path_for(prefix, 0, 1), Checkpoint({}, metadata={"num_processes": 3}))
    write(prefix, (1, 1, 0))
    found = load_at(prefix, 1, rank=2, size=3)
    assert found.own is found.rank_0
    assert load_at(prefix, 1, rank=1, size=3).own.metadata["value"] == 10_100
    flip(path_for(prefix, 1, 1))
    with pytest.raises(DataError, match=r"x-1-0001\.safetensors is damaged"):
        load_at(prefix, 1, rank=2, size=3)
    found = load_at(prefix, 1, rank=1, size=2)
    assert found.own is found.rank_0


def test_the_end_of_an_epoch_is_loaded_by_its_number(tmp_path: Path) -> None:
    prefix = tmp_path / "x"
    write(prefix, (0, 1, 0), (0, 1, 4), (2, 1, 0))
    assert load_at(prefix, 1).path == path_for(prefix, 0, 1)
    assert load_at(prefix, 1, rank=2, size=3).own.metadata["value"] == 20_100
    with pytest.raises(DataError, match=r"x-0007\.safetensors; the newest .*: x-0001-s0000004\.s.*, x-0001\.s"):
        load_at(prefix, 7)


def test_a_file_of_another_save_is_not_taken_for_a_ranks_own(tmp_path: Path) -> None:
    """It has the right name, but an earlier run wrote it: for example, the later run was killed before rank 1 saved."""
    prefix = tmp_path / "x"
    save(path_for(prefix, 0, 1), Checkpoint({}, metadata={"branch": 1, "num_processes": 2}))
    save(path_for(prefix, 1, 1), Checkpoint({}, metadata={"branch": 0, "num_processes": 2}))
    found = load_at(prefix, 1, rank=1, size=2)
    assert found.own is found.rank_0


def test_files_of_an_older_version_are_ordered_by_the_samples_in_their_metadata(tmp_path: Path) -> None:
    """Its mid-epoch names have the batches of a worker, which another batch size or number of workers changes."""
    prefix = tmp_path / "x"
    old = {batch: tmp_path / f"x-0001-b{batch:05d}.safetensors" for batch in (17, 27, 40)}
    for batch, samples in ((17, 850), (27, 540)):
        save(old[batch], Checkpoint({}, metadata={"epoch": 1, "batch": batch, "samples_done": samples}))
    save(old[40], Checkpoint({}))  # of a user's own loop, without samples
    assert [one.path for one in find(prefix)] == [old[17], old[27], old[40]]
    found = load_newest(prefix)
    assert found is not None
    assert found.path == old[17]
    write(prefix, (0, 1, 900))
    prune(prefix, path_for(prefix, 0, 1, 900))
    assert names(tmp_path) == {"x-0001-b00017.safetensors", "x-0001-s0000900.safetensors"}


def test_the_newest_branch_comes_first_whatever_its_position(tmp_path: Path) -> None:
    prefix = tmp_path / "x"
    write_branch(prefix, 0, (4, 0), (4, 700), (5, 0))
    write_branch(prefix, 1, (1, 0), (1, 300))
    assert [one.position for one in find(prefix)] == [(1, 300), (1, 0), (5, 0), (4, 700), (4, 0)]
    found = load_newest(prefix)
    assert found is not None
    assert found.path == path_for(prefix, 0, 1, 300)


def test_a_damaged_header_counts_as_one_of_the_newest_branch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    prefix = tmp_path / "x"
    write_branch(prefix, 2, (1, 0), (3, 0))
    flip(path_for(prefix, 0, 3), at=100)
    found = load_newest(prefix)
    assert found is not None
    assert found.path == path_for(prefix, 0, 1)
    assert "x-0003.safetensors is damaged" in caplog.text


def test_prune_keeps_epoch_ends_and_the_newest_mid_epoch_file(tmp_path: Path) -> None:
    prefix = tmp_path / "x"
    write(prefix, (0, 11, 5), (0, 12, 0), (0, 12, 1), (0, 12, 2), (0, 12, 3), (1, 11, 5))
    prune(prefix, path_for(prefix, 0, 12, 3))
    assert [one.position for one in find(prefix)] == [(12, 3), (12, 0)]
    write(prefix, (0, 13, 0))
    prune(prefix, path_for(prefix, 0, 13))
    assert [one.position for one in find(prefix)] == [(13, 0), (12, 0)]
    assert [one.position for one in find(prefix, 1)] == [(11, 5)]
    prune(prefix, path_for(prefix, 0, 13), ranks=[0, 1])
    assert find(prefix, 1) == []


def test_prune_keeps_the_mid_epoch_file_before_until_there_is_the_end_of_an_epoch(tmp_path: Path) -> None:
    prefix = tmp_path / "x"
    write(prefix, (0, 0, 10), (0, 0, 20), (0, 0, 30))
    prune(prefix, path_for(prefix, 0, 0, 30))
    assert [one.position for one in find(prefix)] == [(0, 30), (0, 20)]
    flip(path_for(prefix, 0, 0, 30))
    found = load_newest(prefix)
    assert found is not None
    assert found.path == path_for(prefix, 0, 0, 20)
    write(prefix, (0, 1, 0), (0, 1, 5))
    prune(prefix, path_for(prefix, 0, 1, 5))
    assert [one.position for one in find(prefix)] == [(1, 5), (1, 0)]


def test_prune_keeps_the_written_file_newer_files_and_other_branches(tmp_path: Path) -> None:
    prefix = tmp_path / "x"
    write_branch(prefix, 0, (2, 800), (5, 100))
    write_branch(prefix, 1, (1, 300), (1, 200), (1, 400))
    prune(prefix, path_for(prefix, 0, 1, 300))
    assert [one.position for one in find(prefix)] == [(1, 400), (1, 300), (1, 200), (5, 100), (2, 800)]
    write_branch(prefix, 1, (1, 0))
    prune(prefix, path_for(prefix, 0, 1, 300))
    assert [one.position for one in find(prefix)] == [(1, 400), (1, 300), (1, 0), (5, 100), (2, 800)]


def dataset_of(*classes: str) -> Dataset:
    augment = AugmentConfig(shape=(1, 8, 8))
    return cast(Dataset, SimpleNamespace(augment=augment, num_classes=2, classes=classes, train=[0]))


def test_a_run_is_not_resumed_with_data_of_other_classes(tmp_path: Path) -> None:
    options = TrainOptions(model_prefix=str(tmp_path / "m"), load_epoch=1)
    trainer = SimpleNamespace(model=nn.Linear(2, 2), sync=lambda: None, optimizer_state=dict, shards_optimizer=False)
    trainer.load_weights = trainer.model.load_state_dict
    trainer.kvstore = SimpleNamespace(rank=0, workers=[0], is_first=True)

    def saver(*classes: str) -> Saver:
        return Saver(options, ProcessRank(0, 1), cast(Trainer, trainer), dataset_of(*classes), None, None)

    first = saver("cat", "dog")
    first.save(RunPosition(1), {})
    first.finish()
    assert load(path_for(tmp_path / "m", 0, 1)).metadata["classes"] == ["cat", "dog"]
    with pytest.raises(DataError, match=r"class 0 is 'cat' in .*m-0001\.safetensors, but 'dog' in the training data"):
        saver("dog", "cat").load()
    for known in (("cat", "dog"), ("cat",), ()):
        assert saver(*known).load() == RunPosition(1)


@pytest.mark.parametrize("sharded", [False, True])
def test_only_the_worker_that_writes_the_optimizer_state_fetches_it(tmp_path: Path, sharded: bool) -> None:
    """Two workers of two devices: the first worker's devices fetch it together, and with shards all processes do."""
    fetched: list[int] = []

    def fetch(rank: int) -> dict[str, torch.Tensor]:
        fetched.append(rank)
        return {"weight/momentum": torch.ones(2, 2)}

    for rank in range(4):
        trainer = SimpleNamespace(model=nn.Linear(2, 2), sync=lambda: None, shards_optimizer=sharded)
        trainer.optimizer_state = partial(fetch, rank)
        trainer.kvstore = SimpleNamespace(rank=rank, workers=[0, 1, 2, 3], is_first=rank == 0)
        options = TrainOptions(model_prefix=str(tmp_path / "m"))
        saver = Saver(options, ProcessRank(rank, 4, 2), cast(Trainer, trainer), dataset_of("a", "b"), None, None)
        saver.save(RunPosition(1), {})
        saver.finish()
    assert fetched == ([0, 1, 2, 3] if sharded else [0, 1])
    assert [list(load(path_for(tmp_path / "m", rank, 1)).optimizer) for rank in (0, 1)] == [["weight/momentum"], []]


def test_tied_weights_and_channels_last_can_be_saved(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            self.one = nn.Linear(5, 5)
            self.two = nn.Linear(5, 5)
            self.two.weight = self.one.weight

    model, other = Tied(), Tied()
    save(tmp_path / "x-0001.safetensors", Checkpoint(model.state_dict()))
    loaded = load(tmp_path / "x-0001.safetensors").weights
    assert all(tensor.is_contiguous() for tensor in loaded.values())
    other.load_state_dict(loaded)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name])


def test_unsupported_tensors_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"weights/z, a torch.strided tensor of torch.complex64; only strided"):
        save(tmp_path / "x-0001.safetensors", Checkpoint({"z": torch.zeros(2, dtype=torch.complex64)}))
    with pytest.raises(UsageError, match=r"extra/s, a torch.sparse_coo tensor"):
        save(tmp_path / "x-0001.safetensors", Checkpoint({}, extra={"s": torch.eye(2).to_sparse()}))
    assert names(tmp_path) == set()


def test_files_that_are_not_checkpoints_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "x-0001.safetensors"
    with pytest.raises(DataError, match=r"there is no checkpoint .*x-0001\.safetensors"):
        load(path)
    torch.save({"a": torch.zeros(3)}, path)
    with pytest.raises(DataError, match=r"x-0001\.safetensors is not an Echelon checkpoint: expected"):
        load(path)
    path.unlink()
    path.mkdir()
    with pytest.raises(DataError, match="Is a directory"):
        load(path)


OLD_FILE = (  # as written before the digests were XXH3
    b'P\x01\0\0\0\0\0\0{"__metadata__":{"blake2b":"777b4487bcf9834e6889b61cf9d9acfe","echelon":"{\\"epoch\\":3}","digests":"'
    b'{\\"weights/w\\":\\"4edaf0fe20d221bc27cb2558c661fea0\\",'
    b'\\"optimizer/m\\":\\"81bb88fb99673a8c278f416002aef8da\\"}"},'
    b'"weights/w":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},'
    b'"optimizer/m":{"dtype":"F16","shape":[2],"data_offsets":[24,28]}}'
    b"\0\0\0\0\0\0\x80?\0\0\0@\0\0@@\0\0\x80@\0\0\xa0@\0<\0<"
)


def test_files_with_the_digests_of_an_older_version_are_loaded_and_checked(tmp_path: Path) -> None:
    path = tmp_path / "x-0003.safetensors"
    path.write_bytes(OLD_FILE)
    loaded = load(path)
    assert loaded.metadata == {"epoch": 3}
    assert torch.equal(loaded.weights["w"], torch.arange(6.0).view(2, 3))
    assert torch.equal(loaded.optimizer["m"], torch.ones(2).half())
    path.write_bytes(OLD_FILE[:-1] + b"=")
    with pytest.raises(DataError, match="the digest of tensor 'optimizer/m'"):
        load(path)


def test_a_file_cut_off_in_the_last_tensor_is_reported_in_bytes(tmp_path: Path) -> None:
    path = tmp_path / "x-0001.safetensors"
    save(path, checkpoint(1))
    size = path.stat().st_size
    os.truncate(path, size - 3)
    with pytest.raises(DataError, match=rf"x-0001\.s.* is damaged: it is cut off at {size - 3} of {size} bytes"):
        load(path)


def test_an_image_does_not_change_with_the_run(tmp_path: Path) -> None:
    weights, metadata = torch.ones(3), {"position": {"samples": 5}}
    image = Image(Checkpoint({"w": weights}, metadata=metadata))
    weights.add_(1)
    metadata["position"]["samples"] = 1_000_000
    image.save(tmp_path / "x-0001.safetensors")
    loaded = load(tmp_path / "x-0001.safetensors")
    assert loaded.metadata == {"position": {"samples": 5}}
    assert loaded.weights["w"].tolist() == [1, 1, 1]


def test_tensors_are_aligned_for_readers_that_map_the_file(tmp_path: Path) -> None:
    path = tmp_path / "x-0001.safetensors"
    odd = {"a": torch.zeros(3, dtype=torch.uint8), "b": torch.zeros(3, dtype=torch.float64), "c": torch.zeros(1).half()}
    save(path, Checkpoint(odd))
    length = int.from_bytes(path.read_bytes()[:8], "little")
    entries = json.loads(path.read_bytes()[8 : 8 + length])
    starts = {name: 8 + length + entries[f"weights/{name}"]["data_offsets"][0] for name in odd}
    assert [starts[name] % odd[name].element_size() for name in odd] == [0, 0, 0]


def test_save_creates_the_folder(tmp_path: Path) -> None:
    save(tmp_path / "new" / "folder" / "x-0001.safetensors", checkpoint(1))
    assert load(tmp_path / "new" / "folder" / "x-0001.safetensors").metadata == {"value": 1}


def test_a_failure_while_writing_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "x-0001.safetensors"
    save(path, checkpoint(1))
    tensors = {"a": torch.zeros(100), "b": torch.empty(100, device="meta")}
    with pytest.raises(NotImplementedError):
        save(path, Checkpoint(tensors))  # b has no data, so saving fails after a is written
    assert load(path).metadata == {"value": 1}
    assert names(tmp_path) == {path.name}


def test_a_full_disk_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "x-0001.safetensors"
    save(path, checkpoint(1))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, hard))
    try:
        with pytest.raises(DataError, match=r"cannot write the checkpoint .*x-0001\.safetensors: File too large"):
            save(path, Checkpoint({"w": torch.zeros(2**20)}))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert load(path).metadata == {"value": 1}
    assert names(tmp_path) == {path.name}


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_kill_9_keeps_the_old_file(tmp_path: Path, call: str) -> None:
    path = tmp_path / "x-0001.safetensors"
    save(path, checkpoint(1))
    assert killed_at(call, lambda: save(path, checkpoint(2)))
    assert load(path).metadata == {"value": 1}
    assert [one.path for one in find(tmp_path / "x")] == [path]
    prune(tmp_path / "x", path, ranks=[1])
    assert len(names(tmp_path)) == 2
    prune(tmp_path / "x", path)
    assert names(tmp_path) == {path.name}
    save(path, checkpoint(3))
    assert load(path).metadata == {"value": 3}


def killed_at(call: str, action: Callable[[], None]) -> bool:
    """Run the action in a process that is killed when it first calls a function of `os`."""

    def program() -> None:
        setattr(os, call, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        action()

    return "ended without a result" in str(Fork(program).result())


def test_random_numbers_continue_after_restoring(tmp_path: Path) -> None:
    path = tmp_path / "x-0001.safetensors"
    torch.manual_seed(5)
    torch.rand(3)
    save(path, Checkpoint({}, extra=capture_rng()))
    expected = torch.rand(3)
    torch.manual_seed(6)
    restore_rng(load(path).extra)
    assert torch.equal(torch.rand(3), expected)
    restore_rng({})
    assert not torch.equal(torch.rand(3), expected)
