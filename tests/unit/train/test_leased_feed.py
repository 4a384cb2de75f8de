"""The loop's view of leased samples: where its log begins, and which epoch a batch belongs to."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import torch
from torch import nn

import echelon
from echelon.cluster.messages import Lease, OpenLedger
from echelon.data.loading.loader import Batches
from echelon.kvstore.leases import Leases
from echelon.train.loop.feeds.feeds import Batch
from echelon.train.loop.feeds.inputs import open_data
from echelon.train.loop.feeds.leased import LeasedFeed
from echelon.train.recipe.options import TrainOptions
from echelon.train.trainer.leased import LeasedBatches

BATCH, ROUND = 8, 16


class ReadAll:
    """Takes the batches of a loader as they are."""

    def batches(self, loader: Batches) -> Iterator[Batch | None]:
        yield from loader


def test_a_resumed_epoch_begins_at_the_batch_of_its_position_and_the_next_one_at_0() -> None:
    options = TrainOptions(data="digits", batch_size=BATCH, num_epochs=3)
    dataset = open_data(options)
    model = nn.Linear(1, 1)
    trainer = echelon.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.01))
    batches = trainer.lease(400, BATCH, num_epochs=3, epoch=1, done=((0, 160), (176, 200)), by_speed=False)
    device = torch.device("cpu")
    feed = LeasedFeed(options, dataset, batches, ROUND, device, lambda position: None, lambda: False)
    assert (feed.epoch, feed.first) == (1, 184 // ROUND)
    assert feed.num_steps(feed.epoch, feed.first) == 400 // ROUND + 184 // ROUND
    for _ in feed.batches(ReadAll()):
        model(torch.ones(1, 1)).sum().backward()
        trainer.step(1)
    assert (feed.epoch, feed.first) == (2, 0)
    feed.close()
    trainer.close()


class HandedOut(Leases):
    """Leases that a test hands out; then all epochs are trained."""

    def __init__(self, opened: OpenLedger, leases: list[Lease]) -> None:
        super().__init__(opened)
        self._given = deque(leases)

    def take(self, *, wait: bool) -> Lease | None:
        self.ended = not self._given
        return self._given.popleft() if self._given else None


def test_samples_of_a_lost_worker_that_come_in_the_next_epoch_belong_to_it() -> None:
    """They keep their own place in the order, and do not end the epoch or move the schedule back."""
    options = TrainOptions(data="digits", batch_size=BATCH, num_epochs=2)
    dataset = open_data(options)
    model = nn.Linear(1, 1)
    trainer = echelon.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.01))
    opened = OpenLedger(0, 32, BATCH, 2)
    given = [(0, [(0, 8), (8, 16)]), (1, [(0, 8)]), (0, [(24, 32)]), (1, [(8, 16)])]
    leases = [Lease(0, 0, 0, number, epoch, batches) for number, (epoch, batches) in enumerate(given, 1)]
    batches = LeasedBatches(HandedOut(opened, leases), trainer, reads_ahead=True)
    trainer._leased = batches  # as `Trainer.lease` does
    feed = LeasedFeed(options, dataset, batches, ROUND, torch.device("cpu"), lambda position: None, lambda: False)
    found = []
    while feed.epoch < 2:
        epoch, positions = feed.epoch, []
        for _ in feed.batches(ReadAll()):
            assert feed._loader.plan is not None
            positions.append((feed._loader.plan.epoch, int(feed._loader.plan.counters[0])))
            assert feed.epochs(epoch, 0) < epoch + 0.5
            model(torch.ones(1, 1)).sum().backward()
            trainer.step(1)
        found.append(positions)
    assert found == [[(0, 0), (0, 8)], [(1, 0), (0, 24), (1, 8)]]
    feed.close()
    trainer.close()
