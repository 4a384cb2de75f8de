"""Where the log of a run begins whose samples come from leases."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

import echelon
from echelon.data.loading.loader import Batches
from echelon.train.loop.feeds.feeds import Batch
from echelon.train.loop.feeds.inputs import open_data
from echelon.train.loop.feeds.leased import LeasedFeed
from echelon.train.recipe.options import TrainOptions

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
