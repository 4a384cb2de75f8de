"""A run is stopped and resumed with another batch size or number of processes, for every pair of (before, after).

The real Saver, file names and order of samples are used; only the training step is replaced by a record of its samples.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch import nn

from echelon.data.images.config import AugmentConfig
from echelon.data.sets.datasets import Dataset
from echelon.train.checkpoint.names import find, load_newest, path_for
from echelon.train.checkpoint.saver import RunPosition, Saver
from echelon.train.recipe.options import TrainOptions
from echelon.train.recipe.plan import ProcessRank, sampling_for, state_at
from echelon.train.trainer import Trainer

NUM_SAMPLES = 1200  # a multiple of every layout's samples per step


@dataclass(frozen=True, slots=True)
class Layout:
    """How the processes of a run share a step."""

    num_workers: int
    batch_size: int
    num_devices: int = 1

    @property
    def step(self) -> int:
        return self.num_workers * self.batch_size

    def __str__(self) -> str:
        return f"{self.num_workers}x{self.num_devices} b{self.batch_size}"


LAYOUTS = [Layout(workers, batch) for workers in (1, 2, 3) for batch in (20, 50)] + [Layout(1, 20, 2), Layout(2, 50, 2)]
PAIRS = list(itertools.product(LAYOUTS, LAYOUTS))


class Session:
    """All processes of a run from its start to its stop."""

    def __init__(self, prefix: Path, layout: Layout, resume: bool = True, load_epoch: int | None = None) -> None:
        options = TrainOptions(
            batch_size=layout.batch_size,
            devices=("cpu",) * layout.num_devices,
            model_prefix=str(prefix),
            resume=resume and load_epoch is None,
            load_epoch=load_epoch,
        )
        size = layout.num_workers * layout.num_devices
        places = [ProcessRank(rank, size, layout.num_devices) for rank in range(size)]
        self.layout, self.prefix = layout, prefix
        self.samplings = [sampling_for(options, NUM_SAMPLES, place, fixed=True) for place in places]
        self.savers = [_saver(options, place) for place in places]
        positions = {saver.load() for saver in self.savers}
        assert len(positions) == 1, "all processes resume at the same position"
        self.found = positions.pop()
        states = {state_at(one, self.found.epoch, self.found.samples_done, size) for one in self.samplings}
        assert len(states) == 1
        self.state = states.pop()

    def train(self, steps: int, trained: Counter[tuple[int, int]]) -> RunPosition:
        """Run some steps, and count their samples by (epoch, sample); returns the position after them."""
        after = self.state
        for sampling in self.samplings:
            for plan in itertools.islice(sampling.batches(self.state), steps):
                trained.update((plan.epoch, int(record)) for record in plan.records)
                after = plan.after
        done = after.position // self.samplings[0].batch_size
        return RunPosition(after.epoch, done, after.position * len(self.samplings))

    def save(self, position: RunPosition) -> Path:
        """Save on all ranks; returns the file that the log announces."""
        for saver in self.savers:
            saver.save(position, {})
            saver.finish()
        return path_for(self.prefix, 0, position.epoch, position.samples_done)


def _saver(options: TrainOptions, place: ProcessRank, store: str = "dist_sync") -> Saver:
    model = nn.Linear(2, 2)
    trainer = SimpleNamespace(
        model=model,
        sync=lambda: None,
        shards_optimizer=False,
        optimizer_state=dict,
        load_weights=model.load_state_dict,
        kvstore=SimpleNamespace(type=store, rank=place.rank, workers=list(range(place.size)), is_first=place.rank == 0),
    )
    dataset = SimpleNamespace(
        augment=AugmentConfig(shape=(1, 8, 8)), num_classes=2, classes=(), train=range(NUM_SAMPLES)
    )
    return Saver(options, place, cast(Trainer, trainer), cast(Dataset, dataset), None, None)


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def steps_until(layout: Layout, samples: int) -> int:
    return max(1, samples // layout.step)


def assert_complete(trained: Counter[tuple[int, int]], layouts: Sequence[Layout], epoch: int = 0) -> None:
    """Every sample of the epoch was trained; fewer were repeated than one step of each resumed session has."""
    counts = [trained[epoch, sample] for sample in range(NUM_SAMPLES)]
    assert min(counts) >= 1, "a sample was left out"
    assert sum(counts) - NUM_SAMPLES < max(1, sum(layout.step for layout in layouts))


@pytest.mark.parametrize(("before", "after"), PAIRS, ids=lambda layout: str(layout))
def test_the_newest_progress_is_resumed_in_mid_epoch(tmp_path: Path, before: Layout, after: Layout) -> None:
    prefix, trained = tmp_path / "m", Counter[tuple[int, int]]()
    first = Session(prefix, before)
    stop = first.train(steps_until(before, 540), trained)
    assert first.save(stop).exists()
    for layout in (after, before):  # and back again
        session = Session(prefix, layout)
        assert session.found == stop
        assert stop.samples_done - layout.step < session.state.position * len(session.samplings) <= stop.samples_done
        stop = session.train(1, trained)
        announced = session.save(stop)
        assert announced.exists()
        assert find(prefix)[0].path == announced
        for rank in range(len(session.savers)):
            found = load_newest(prefix, rank, len(session.savers))
            assert found is not None
            assert found.path == announced
            assert (found.own is found.rank_0) == (rank == 0), "each rank has its own file"
    last = Session(prefix, before)
    last.train(NUM_SAMPLES // before.step - last.state.position // last.samplings[0].batch_size, trained)
    assert_complete(trained, [after, before, before])
    assert len(files(tmp_path)) <= 2 * len(last.savers), "only the newest two mid-epoch files of each rank are kept"


@pytest.mark.parametrize(("before", "after"), PAIRS, ids=lambda layout: str(layout))
def test_the_end_of_an_epoch_is_resumed_exactly(tmp_path: Path, before: Layout, after: Layout) -> None:
    prefix, trained = tmp_path / "m", Counter[tuple[int, int]]()
    first = Session(prefix, before)
    end = first.train(NUM_SAMPLES // before.step, trained)
    assert end == RunPosition(1)
    first.save(end)
    second = Session(prefix, after)
    assert second.found == end
    middle = second.save(second.train(1, trained))
    assert find(prefix)[0].path == middle
    again = Session(prefix, before)
    stop = again.train(NUM_SAMPLES // before.step - again.state.position // again.samplings[0].batch_size, trained)
    assert stop == RunPosition(2)
    assert again.save(stop).exists()
    assert not middle.exists(), "the end of the epoch replaces it"
    assert_complete(trained, [], epoch=0)
    assert_complete(trained, [before], epoch=1)
    assert [name.position for name in find(prefix)] == [(2, 0), (1, 0)]


def test_a_file_of_an_older_version_is_resumed_and_replaced(tmp_path: Path) -> None:
    """It is named by its batches: 27 of 20 samples, and the resumed run saves after 17 of 50."""
    prefix, trained = tmp_path / "m", Counter[tuple[int, int]]()
    first = Session(prefix, Layout(1, 20))
    written = first.save(first.train(27, trained))
    written.rename(tmp_path / "m-0000-b00027.safetensors")
    second = Session(prefix, Layout(1, 50))
    assert second.found.samples_done == 540
    announced = second.save(second.train(7, trained))
    assert announced.name == "m-0000-s0000850.safetensors"
    later = second.save(RunPosition(0, 27, 900))
    assert files(tmp_path) == {announced.name, later.name}, "the newest two are kept"


def test_a_new_run_with_the_prefix_of_an_earlier_one_is_what_is_resumed(tmp_path: Path) -> None:
    prefix, unused = tmp_path / "m", Counter[tuple[int, int]]()
    for epoch in (3, 4, 5):
        Session(prefix, Layout(2, 50)).save(RunPosition(epoch))
    fresh = Session(prefix, Layout(2, 20), resume=False)
    assert fresh.found == RunPosition()
    announced = fresh.save(fresh.train(5, unused))
    assert announced.exists()
    assert Session(prefix, Layout(2, 20)).found == RunPosition(0, 5, 200)
    assert path_for(prefix, 0, 5).exists(), "the earlier run's files stay"


def test_a_run_that_goes_back_to_an_earlier_epoch_is_what_is_resumed(tmp_path: Path) -> None:
    prefix, unused = tmp_path / "m", Counter[tuple[int, int]]()
    first = Session(prefix, Layout(1, 20))
    for epoch in (1, 2, 3):
        first.save(RunPosition(epoch))
    abandoned = first.save(RunPosition(3, 10, 200))
    back = Session(prefix, Layout(1, 20), load_epoch=1)
    assert back.found == RunPosition(1)
    announced = back.save(back.train(4, unused))
    assert announced.exists()
    assert abandoned.exists()
    assert Session(prefix, Layout(1, 50)).found == RunPosition(1, 4, 80)


def test_loading_the_newest_epoch_continues_its_run(tmp_path: Path) -> None:
    prefix = tmp_path / "m"
    first = Session(prefix, Layout(1, 20))
    first.save(RunPosition(1))
    middle = first.save(RunPosition(1, 3, 60))
    first.save(RunPosition(2))
    assert not middle.exists()
    second = Session(prefix, Layout(1, 20), load_epoch=2)
    second.save(RunPosition(2, 1, 20))
    assert [name.branch for name in find(prefix)] == [0, 0, 0]


# --- workers that do not wait for each other


def started(prefix: Path, layout: Layout, **given: Any) -> tuple[list[Saver], list[RunPosition]]:
    """Start the processes of a dist_async run; returns their savers, and where each of them continues."""
    devices = ("cpu",) * layout.num_devices
    plain = TrainOptions(batch_size=layout.batch_size, devices=devices, model_prefix=str(prefix), resume=True)
    size = layout.num_workers * layout.num_devices
    places = [ProcessRank(rank, size, layout.num_devices) for rank in range(size)]
    savers = [_saver(replace(plain, **given), place, "dist_async") for place in places]
    return savers, [saver.load() for saver in savers]


def stop(savers: Sequence[Saver], positions: Sequence[RunPosition], *, is_last: bool = True) -> None:
    for saver, position in zip(savers, positions, strict=True):
        saver.save(position, {}, is_last=is_last)
        saver.finish()


AHEAD, SECOND, BEHIND = RunPosition(2, 5, 300), RunPosition(1, 7, 420), RunPosition(0, 3, 180)


def test_stopped_workers_that_do_not_wait_continue_each_at_its_own_place(tmp_path: Path) -> None:
    layout, places = Layout(3, 20), [SECOND, AHEAD, BEHIND]
    stop(started(tmp_path / "m", layout)[0], places)
    savers, found = started(tmp_path / "m", layout)
    assert found == places
    further = [RunPosition(3), RunPosition(2, 6, 360), RunPosition(0, 4, 240)]
    stop(savers, further)
    assert started(tmp_path / "m", layout)[1] == further
    stop(savers, [RunPosition(4), RunPosition(2, 7, 420), RunPosition(0, 5, 300)])
    assert len(files(tmp_path)) == 6, "of each worker the newest two are kept"


@pytest.mark.parametrize("layout", [Layout(2, 20), Layout(4, 20), Layout(3, 50), Layout(3, 20, 2)], ids=str)
def test_in_another_layout_they_continue_at_the_place_of_rank_0(tmp_path: Path, layout: Layout) -> None:
    stop(started(tmp_path / "m", Layout(3, 20))[0], [SECOND, AHEAD, BEHIND])
    _, found = started(tmp_path / "m", layout)
    assert found == [SECOND] * (layout.num_workers * layout.num_devices)


def test_a_worker_without_a_file_of_the_last_stop_continues_at_the_place_of_rank_0(tmp_path: Path) -> None:
    layout = Layout(3, 20)
    stop(started(tmp_path / "m", layout)[0], [SECOND, AHEAD, BEHIND])
    savers, _ = started(tmp_path / "m", layout)
    stop(savers[:2], [RunPosition(2), RunPosition(2, 6, 360)])  # the third worker is killed
    assert started(tmp_path / "m", layout)[1] == [RunPosition(2), RunPosition(2, 6, 360), RunPosition(2)]
    stop(savers, [RunPosition(3), RunPosition(4), RunPosition(2)], is_last=False)  # then all are
    assert started(tmp_path / "m", layout)[1] == [RunPosition(3)] * 3


def test_the_devices_of_a_worker_continue_at_one_place(tmp_path: Path) -> None:
    layout = Layout(2, 20, 2)
    stop(started(tmp_path / "m", layout)[0], [SECOND, SECOND, BEHIND, BEHIND])
    assert started(tmp_path / "m", layout)[1] == [SECOND, SECOND, BEHIND, BEHIND]
    damaged = find(tmp_path / "m", 3)[0].path
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert started(tmp_path / "m", layout)[1] == [SECOND] * 4


def test_an_epoch_starts_again_when_the_shares_of_the_data_change(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The samples that are done are then not the first ones of the new shares."""
    layout, shares = Layout(2, 20), tmp_path / "shares"
    given = {"data_allocator": 1, "data_sharding": str(shares)}
    shares.write_text("0 0.5\n0.5 1\n")
    stop(started(tmp_path / "m", layout, **given)[0], [SECOND, SECOND])
    assert started(tmp_path / "m", layout, **given)[1] == [SECOND, SECOND]
    assert caplog.messages == []
    shares.write_text("0 0.25\n0.25 1\n")
    savers, found = started(tmp_path / "m", layout, **given)
    assert found == [RunPosition(1)] * 2
    assert "epoch 1 starts again, so that no sample is left out" in caplog.messages[0]
    early = RunPosition(1, 1, 40)
    stop(savers, [early, early])
    assert started(tmp_path / "m", layout, **given)[1] == [early, early], "this is the newest progress"
    assert started(tmp_path / "m", layout)[1] == [RunPosition(1)] * 2, "and without shares"
