"""Loops over unusual batches, and loops that end early or at different times."""

from __future__ import annotations

import copy
import warnings

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from loops.kinds import FEATURES, TARGETS
from loops.loop import ALONE, ENDS, Result, Run, loop, refused
from loops.models import WIDTH, begin, device_type, mlp, step

TOO_LATE = refused("Trainer(overlap=False)")


@loop("batches of another size on each worker: samples count the same", reference=ALONE)
def unequal_batches(run: Run) -> Result:
    model, optimizer, net = begin(run)
    for inputs, targets in run.batches(sizes=(3, 8)):
        loss = mse_loss(net(inputs), targets)
        run.record(loss)
        step(loss, optimizer)
    return model


@loop("a last batch that is smaller")
def smaller_last(run: Run) -> Result:
    model, optimizer, net = begin(run)
    for number, (inputs, targets) in enumerate(run.batches()):
        used = 3 if number % 4 == 3 else len(inputs)
        loss = mse_loss(net(inputs[:used]), targets[:used])
        run.record(loss)
        step(loss, optimizer)
    return model


@loop("an empty batch on one worker", reference=ALONE)
def empty_batch(run: Run) -> Result:
    model, optimizer, net = begin(run)
    for inputs, targets in run.batches(sizes=(8, 0)):
        loss = mse_loss(net(inputs), targets, reduction="sum") / max(1, len(inputs))
        if len(inputs):
            run.record(loss)
        step(loss, optimizer)
    return model


@loop("inputs as keyword arguments and in a dict")
def keyword_inputs(run: Run) -> Result:
    class Takes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = mlp()

        def forward(self, batch: dict[str, Tensor], *, scale: float) -> dict[str, Tensor]:
            return {"outputs": scale * self.layers(batch["inputs"])}

    model, optimizer, net = begin(run, Takes())
    for inputs, targets in run.batches():
        loss = mse_loss(net(batch={"inputs": inputs}, scale=0.9)["outputs"], targets)
        run.record(loss)
        step(loss, optimizer)
    return model


@loop("a DataLoader that shuffles with a seed")
def data_loader(run: Run) -> Result:
    model, optimizer, net = begin(run)
    inputs, targets = (torch.cat(parts) for parts in zip(*run.batches(4), strict=True))
    generator = torch.Generator(device_type()).manual_seed(1)
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=8, shuffle=True, generator=generator)
    for _ in range(max(1, run.steps // 4)):
        for some, wanted in loader:
            loss = mse_loss(net(some), wanted)
            run.record(loss)
            step(loss, optimizer)
    return model


@loop(
    "a DataLoader with a worker process, started while the Trainer exists",
    only_on_cpu="a process that a DataLoader forks cannot use CUDA",
)
def data_loader_process(run: Run) -> Result:
    model, optimizer, net = begin(run)
    inputs, targets = (torch.cat(parts) for parts in zip(*run.batches(4), strict=True))
    for _ in range(max(1, run.steps // 4)):
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # a fork beside other threads
            loaded = list(DataLoader(TensorDataset(inputs, targets), batch_size=8, num_workers=1))
        for some, wanted in loaded:
            loss = mse_loss(net(some), wanted)
            run.record(loss)
            step(loss, optimizer)
    return model


@loop("epochs with an evaluation after each one")
def epochs(run: Run) -> Result:
    model, optimizer, net = begin(run)
    scores = []
    for _ in range(run.steps // 3):
        model.train()
        for loss in run.losses(net, steps=3):
            step(loss, optimizer)
        model.eval()
        with torch.no_grad():
            scores.append(mse_loss(model(torch.ones(4, FEATURES)), torch.ones(4, TARGETS)))
    return model, scores


@loop("trains in eval mode: model.eval(), then forward and backward")
def eval_mode(run: Run) -> Result:
    model, optimizer, net = begin(
        run, nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, TARGETS))
    )
    model.eval()
    for loss in run.losses(net):
        step(loss, optimizer)
    return model


@loop("early stopping: all workers break when the mean loss is small", learns=False)  # four batches, each seen once
def early_stopping(run: Run) -> Result:
    model, optimizer, net = begin(run)
    for number, loss in enumerate(run.losses(net)):
        step(loss, optimizer)
        if number >= 3 and float(run.all_reduce(loss.detach())) < 10:
            break
    return model


@loop("catches an error in one step and goes on with the next batch")
def catches(run: Run) -> Result:
    model, optimizer, net = begin(run)
    for number, (inputs, targets) in enumerate(run.batches()):
        try:
            if number == 2:
                raise RuntimeError("a defective batch")
            loss = mse_loss(net(inputs), targets)
            run.record(loss)
            step(loss, optimizer)
        except RuntimeError:
            optimizer.zero_grad()
    return model


@loop("leaves out a step after backward(); the next one starts with zero_grad()", sync=TOO_LATE, relaxed=TOO_LATE)
def interrupted_step(run: Run) -> Result:
    model, optimizer, net = begin(run)
    for number, loss in enumerate(run.losses(net)):
        optimizer.zero_grad()
        loss.backward()
        if number == 3:
            continue
        optimizer.step()
    return model


@loop("fewer batches on one worker than on the other", reference=ENDS)
def fewer_batches(run: Run) -> Result:
    model, optimizer, net = begin(run)
    for loss in run.losses(net, steps=run.steps - 2 * run.rank):
        step(loss, optimizer)
    return model


@loop("one worker leaves the loop early (break)", reference=ENDS)
def one_breaks(run: Run) -> Result:
    model, optimizer, net = begin(run)
    for number, loss in enumerate(run.losses(net)):
        step(loss, optimizer)
        if run.rank == 1 and number == run.steps // 2:
            break
    return model


@loop("no batch at all on one worker", reference=ENDS)
def no_batches(run: Run) -> Result:
    model, optimizer, net = begin(run)
    for loss in run.losses(net, steps=0 if run.rank else run.steps):
        step(loss, optimizer)
    return model


@loop("a generator that yields the same batch for several steps")
def several_steps_per_batch(run: Run) -> Result:
    model, optimizer, net = begin(run)
    for inputs, targets in run.batches(max(1, run.steps // 3)):
        for _ in range(3):
            loss = mse_loss(net(inputs), targets)
            run.record(loss)
            step(loss, optimizer)
    return model


@loop("trains on the output of a frozen copy of itself (a generator inside the loop)")
def frozen_copy(run: Run) -> Result:
    model, optimizer, net = begin(run)
    frozen = copy.deepcopy(model).requires_grad_(False)
    for inputs, _ in run.batches():
        loss = mse_loss(net(inputs), frozen(inputs) * 0.5)
        run.record(loss)
        step(loss, optimizer)
    return model
