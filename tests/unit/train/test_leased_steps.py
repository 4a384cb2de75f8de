"""Which samples a Trainer's steps use: one process, and leases that arrive late."""

from __future__ import annotations

import time
from collections import Counter, deque

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import echelon
from echelon.cluster.messages import Lease, OpenLedger, Work
from echelon.errors import UsageError, WorkerRemoved
from echelon.kvstore.leases import EqualLeases, Leases
from echelon.train.trainer.leased import LeasedBatches


def make_trainer() -> tuple[nn.Module, echelon.Trainer]:
    model = nn.Linear(1, 1)
    return model, echelon.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.01))


def test_one_process_sees_each_sample_once_per_epoch_in_a_new_order() -> None:
    model, trainer = make_trainer()
    seen: list[list[int]] = [[]]
    for index in trainer.samples(10, 4, epochs=2):
        if len(seen[-1]) == 10:
            seen.append([])
        seen[-1] += index.tolist()
        model(index.float()[:, None]).sum().backward()
        trainer.step(len(index))
    assert [sorted(epoch) for epoch in seen] == [list(range(10))] * 2
    assert seen[0] != seen[1]
    assert trainer.clock == 2 * 3
    again = torch.cat(list(trainer.samples(10, 4))).tolist()
    assert again not in seen, "calls one after the other count the epochs on"


def test_a_second_use_at_the_same_time_is_refused() -> None:
    _, trainer = make_trainer()
    indices = trainer.samples(10, 4)
    next(indices)
    with pytest.raises(UsageError, match="cannot be used twice"):
        trainer.samples(10, 4)
    indices.close()  # type: ignore[attr-defined]
    assert len(list(trainer.samples(10, 4, shuffle=False))) == 3


@pytest.mark.parametrize("wrong", [(0, 4), (10, 0), (-1, 2)])
def test_an_impossible_number_of_samples_is_refused(wrong: tuple[int, int]) -> None:
    _, trainer = make_trainer()
    with pytest.raises(UsageError, match="samples"):
        trainer.samples(*wrong)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_loader_gets_each_sample_once_per_epoch(workers: int) -> None:
    model, trainer = make_trainer()
    dataset = TensorDataset(torch.arange(20.0)[:, None])
    sampler = echelon.LeaseSampler(trainer, len(dataset), 3, epochs=2)
    loader = DataLoader(dataset, batch_sampler=sampler, num_workers=workers)
    seen: Counter[int] = Counter()
    passes = 0
    while sampler.has_more:
        passes += 1
        for (values,) in loader:
            seen.update(values[:, 0].int().tolist())
            model(values).sum().backward()
            trainer.step()
    assert seen == dict.fromkeys(range(20), 2)
    assert passes == 2
    assert trainer.clock == 2 * 7


class Late(Leases):
    """Leases that a test hands out."""

    def __init__(self, lock_step: bool = False) -> None:
        super().__init__(OpenLedger(0, 100, 10, 1, lock_step=lock_step))
        self.arrived: deque[Lease] = deque()
        self.reports: list[tuple[int, int]] = []
        self.returned: list[int] = []
        self.asked: list[int] = []

    def take(self, *, wait: bool) -> Lease | None:
        self.ended = self.ended or (wait and not self.arrived)
        return self.arrived.popleft() if self.arrived else None

    def ask(self, clock: int) -> None:
        self.asked.append(clock)

    def trained(self, lease: int, count: int, seconds: float) -> None:
        self.reports.append((lease, count))

    def give_back(self, lease: int) -> None:
        self.returned.append(lease)


class Steps:
    """The steps of a Trainer."""

    wait_s = 0.0

    def __init__(self) -> None:
        self.work: list[Work] = []
        self.made: list[list[Work]] = []
        self.leased: LeasedBatches | None = None

    @property
    def next_clock(self) -> int:
        return len(self.made)

    def set_work(self, work: list[Work]) -> None:
        self.work = work

    def sync(self) -> None:
        pass

    def step(self, *, is_applied: bool = True) -> None:
        assert self.leased is not None
        self.made.append(self.work)
        self.leased.stepped(is_applied=is_applied)

    def make_empty_round(self) -> None:
        self.step()

    def join_again(self, error: WorkerRemoved) -> None:
        raise error


def leased(leases: Late, *, reads_ahead: bool = False) -> tuple[LeasedBatches, Steps]:
    steps = Steps()
    steps.leased = LeasedBatches(leases, steps, reads_ahead=reads_ahead)
    return steps.leased, steps


def lease(number: int, *batches: tuple[int, int], first_clock: int = 0) -> Lease:
    return Lease(0, 0, 0, number, 0, list(batches), first_clock)


def test_a_lease_is_reported_when_its_last_step_is_applied() -> None:
    leases = Late()
    batches, steps = leased(leases)
    leases.arrived.append(lease(1, (0, 10), (10, 20)))
    batches.take()
    steps.step()
    assert not leases.reports
    batches.take()
    assert steps.work == [Work(0, 10, 20)]
    assert leases.asked == [2], "the next lease is requested when the last batch begins"
    steps.step(is_applied=False)  # its answers are not here yet (lazy_pull)
    assert not leases.reports
    leases.arrived.append(lease(2, (20, 30)))
    batches.take()
    steps.step(is_applied=False)
    assert leases.reports == [(1, 2)]
    assert batches.take() is None
    assert leases.reports == [(1, 2), (2, 1)], "before it waits, all steps are applied and reported"


def test_batches_that_were_accumulated_belong_to_one_step() -> None:
    leases = Late()
    batches, steps = leased(leases)
    leases.arrived.append(lease(1, (0, 10), (10, 20), (30, 40)))
    for _ in range(3):
        batches.take()
    steps.step()
    assert steps.made == [[Work(0, 0, 20), Work(0, 30, 40)]]
    assert leases.reports == [(1, 3)]


def test_a_loader_reads_ahead_and_each_step_uses_the_oldest_batch() -> None:
    leases = Late()
    batches, steps = leased(leases, reads_ahead=True)
    leases.arrived.append(lease(1, (0, 10), (20, 30), (40, 50)))
    for _ in range(3):
        batches.take(wait=False)
    assert batches.take(wait=False) is None
    steps.step()
    batches.accumulated(1)
    steps.step()
    assert steps.made == [[Work(0, 0, 10)], [Work(0, 20, 30), Work(0, 40, 50)]]


def test_batches_that_a_loader_read_and_nobody_used_come_again() -> None:
    leases = Late()
    batches, steps = leased(leases, reads_ahead=True)
    leases.arrived.append(lease(1, (0, 10), (20, 30)))
    batches.take(wait=False)
    batches.take(wait=False)
    steps.step()
    again = batches.take(wait=True)
    assert again is not None
    assert again.start == 20


def test_batches_of_a_removed_worker_that_a_loader_has_read_are_lost() -> None:
    leases = Late()
    batches, steps = leased(leases, reads_ahead=True)
    leases.arrived.append(lease(1, (0, 10), (20, 30), (40, 50)))
    for _ in range(3):
        batches.take(wait=False)
    batches.drop_step()  # it notices in the step of the first one that it was removed
    batches.forget()
    leases.arrived.append(lease(2, (60, 70)))
    batches.take(wait=False)
    for lost in (True, True, False):
        assert batches.loses_step == lost
        steps.step()
    assert steps.made == [[], [], [Work(0, 60, 70)]]
    assert leases.reports == [(2, 1)]


def test_lost_batches_that_a_loader_drops_have_no_step() -> None:
    leases = Late()
    batches, steps = leased(leases, reads_ahead=True)
    leases.arrived.append(lease(1, (0, 10), (20, 30), (40, 50)))
    for _ in range(3):
        batches.take(wait=False)
    assert batches.drop_lost(2) == 0
    batches.forget()
    assert batches.drop_lost(2) == 2, "the first one is at hand"
    leases.arrived.append(lease(2, (60, 70)))
    batches.take(wait=False)
    steps.step()
    steps.step()
    assert steps.made == [[], [Work(0, 60, 70)]]


def test_batches_that_were_accumulated_with_lost_ones_are_returned() -> None:
    leases = Late()
    batches, steps = leased(leases)
    leases.arrived += [lease(1, (0, 10)), lease(2, (20, 30), (30, 40), (40, 50))]
    batches.take()
    batches.accumulated()
    batches.forget()
    batches.take()
    assert batches.loses_step, "the gradients have the samples of the first batch"
    steps.step()
    assert steps.made == [[]]
    assert leases.returned == [2]
    assert not leases.reports
    leases.arrived.append(lease(3, (20, 30)))
    batches.take()
    steps.step()
    assert steps.made == [[], [Work(0, 20, 30)]]


def test_a_batch_is_not_returned_if_the_worker_was_removed_meanwhile() -> None:
    leases = Late()
    batches, steps = leased(leases)
    leases.arrived += [lease(1, (0, 10)), lease(2, (20, 30))]
    ask = leases.ask

    def ask_and_learn(clock: int) -> None:
        leases.ask = ask  # type: ignore[method-assign]
        batches.forget()

    leases.ask = ask_and_learn  # type: ignore[method-assign]
    batch = batches.take()
    assert batch is not None
    assert batch.start == 20
    steps.step()
    assert steps.made == [[Work(0, 20, 30)]]


class Slow(Late):
    """Leases whose answers take long: a wait without an interruption would not end."""

    def take(self, *, wait: bool) -> Lease | None:
        while wait and not self.arrived and not self.ended and not self.is_interrupted():
            time.sleep(0.01)
        return self.arrived.popleft() if self.arrived else None


def test_accumulated_batches_wait_for_their_step_across_leases() -> None:
    leases = Late()
    batches, steps = leased(leases)
    leases.arrived.append(lease(1, (0, 10)))
    batches.take()
    batches.accumulated()
    leases.arrived.append(lease(2, (20, 30), first_clock=3))
    batches._wait_for_lease()  # as if the second one had come late
    assert not leases.reports, "no step has used the first batch"
    batches.take()
    assert steps.work == [Work(0, 0, 10), Work(0, 20, 30)]
    steps.step()
    assert steps.made == [[Work(0, 0, 10), Work(0, 20, 30)], [], []], "empty rounds do not divide the step"
    assert leases.reports == [(1, 1), (2, 1)]


def test_accumulated_batches_count_if_an_epoch_cannot_end_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echelon.train.trainer.leased.UNUSED_S", 0.05)
    leases = Slow()
    batches, _ = leased(leases)
    leases.arrived.append(lease(1, (0, 10)))
    batches.take()
    batches.accumulated()
    report = leases.trained

    def report_and_end(lease: int, count: int, seconds: float) -> None:
        report(lease, count, seconds)
        leases.ended = True

    leases.trained = report_and_end  # type: ignore[method-assign]
    assert batches.take() is None
    assert leases.reports == [(1, 1)]


def read_ahead(*sizes: int) -> tuple[LeasedBatches, Steps, Late]:
    leases = Late()
    batches, steps = leased(leases, reads_ahead=True)
    leases.arrived.append(lease(1, *((20 * number, 20 * number + size) for number, size in enumerate(sizes))))
    for _ in sizes:
        batches.take(wait=False)
    return batches, steps, leases


def test_parts_of_one_batch_do_not_use_up_the_next_one() -> None:
    batches, steps, _ = read_ahead(10, 10)
    batches.accumulated(0)
    batches.begin_step(adds_batch=True)
    steps.step()
    assert steps.made == [[Work(0, 0, 10)]]


@pytest.mark.parametrize("adds_batch", [True, False])
def test_several_batches_in_one_block_belong_to_one_step(adds_batch: bool) -> None:
    batches, steps, _ = read_ahead(10, 10, 10, 10)
    batches.accumulated(2)
    batches.begin_step(adds_batch=adds_batch)
    steps.step()
    assert steps.made == [[Work(0, 0, 10), Work(0, 20, 30), *([Work(0, 40, 50)] if adds_batch else [])]]
    steps.step()
    assert steps.made[1] == [Work(0, 60, 70) if adds_batch else Work(0, 40, 50)]


def test_a_block_of_accumulation_must_say_what_it_used() -> None:
    batches, steps, _ = read_ahead(10, 10)
    for samples in (5, 20, None):
        with pytest.raises(UsageError, match=r"accumulate\(batches=n\)"):
            batches.accumulated(None, samples)
    with pytest.raises(UsageError, match="2 batches that no step has used"):
        batches.accumulated(3)
    batches.accumulated(None, 10)
    steps.step()
    assert steps.made == [[Work(0, 0, 10), Work(0, 20, 30)]]


def test_accumulated_batches_do_not_come_again() -> None:
    batches, steps, leases = read_ahead(10, 10)
    batches.accumulated(1)
    again = batches.take(wait=True)
    assert again is not None
    assert again.start == 20
    steps.step()
    assert steps.made == [[Work(0, 0, 10), Work(0, 20, 30)]]
    assert leases.reports == [(1, 2)]


def test_a_step_of_more_intervals_than_it_can_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echelon.train.trainer.leased.MAX_WORK", 2)
    batches, _, _ = read_ahead(10, 10, 10)
    batches.accumulated(1)
    with pytest.raises(UsageError, match="fewer batches per step"):
        batches.accumulated(1)


@pytest.mark.parametrize("parts", ["micro", "one block"])
def test_a_data_loader_with_accumulation_gets_each_sample_once(parts: str) -> None:
    model, trainer = make_trainer()
    dataset = TensorDataset(torch.arange(24.0)[:, None])
    sampler = echelon.LeaseSampler(trainer, len(dataset), 2)
    loader = DataLoader(dataset, batch_sampler=sampler, num_workers=1)
    seen: Counter[int] = Counter()
    while sampler.has_more:
        iterator = iter(loader)
        for (values,) in iterator:
            used = [values]
            if parts == "micro":
                with trainer.accumulate(batches=0):
                    model(values[:1]).sum().backward()
                model(values[1:]).sum().backward()
            else:
                with trainer.accumulate(batches=2):
                    used.append(next(iterator)[0])
                    for one in used:
                        model(one).sum().backward()
            trainer.step()
            seen.update(torch.cat(used)[:, 0].int().tolist())
    assert seen == dict.fromkeys(range(24), 1)
    assert trainer.clock == (12 if parts == "micro" else 6)


def test_accumulate_asks_for_the_number_of_batches_if_it_is_not_one() -> None:
    model, trainer = make_trainer()
    dataset = TensorDataset(torch.arange(8.0)[:, None])
    sampler = echelon.LeaseSampler(trainer, len(dataset), 2)
    (values,) = next(iter(DataLoader(dataset, batch_sampler=sampler)))
    refused = pytest.raises(UsageError, match="saw 1 samples, but the next batch of the LeaseSampler has 2")
    with refused, trainer.accumulate():
        model(values[:1]).sum().backward()


def test_empty_steps_are_made_between_the_others_and_before_the_first_round() -> None:
    leases = Late(lock_step=True)
    batches, steps = leased(leases)
    leases.arrived.append(lease(1, (0, 10), (0, 0), first_clock=2))
    first = batches.take()
    assert first is not None
    assert len(steps.made) == 2, "it joined two rounds before its lease begins"
    steps.step()
    assert batches.take() is None
    assert steps.made == [[], [], [Work(0, 0, 10)], []]
    assert leases.reports == [(1, 2)]


def test_what_no_step_has_used_is_returned_when_a_loop_ends_early() -> None:
    leases = Late()
    batches, steps = leased(leases)
    leases.arrived.append(lease(1, (0, 10), (10, 20), (20, 30)))
    batches.take()
    steps.step()
    batches.take()
    batches.close()
    assert leases.reports == [(1, 1)]
    assert steps.work == []


def test_equal_parts_without_servers_cover_each_epoch() -> None:
    opened = OpenLedger(0, 23, 4, 2, done=[(0, 5)])
    counts: Counter[tuple[int, int]] = Counter()
    numbers = []
    for rank in range(3):
        leases = EqualLeases(opened, range(3), rank)
        batches = []
        while (found := leases.take(wait=True)) is not None:
            batches += [(found.epoch, batch) for batch in found.batches]
        numbers.append(len(batches))
        counts.update((epoch, at) for epoch, (start, stop) in batches for at in range(start, stop))
    assert len(set(numbers)) == 1, "all make the same number of steps"
    expected = {(epoch, at) for epoch in range(2) for at in range(23) if (epoch, at) >= (0, 5)}
    assert counts == dict.fromkeys(expected, 1)
