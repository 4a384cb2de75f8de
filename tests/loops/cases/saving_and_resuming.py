"""Loops that save their state and continue from it. A resumed run equals one that was not interrupted."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import torch
from torch import nn
from torch.optim import Adam, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR

from loops.kinds import FEATURES, TARGETS
from loops.loop import Result, Run, loop, refused
from loops.models import WIDTH, begin, mlp, momentum, step

EDIT = refused("trainer.edit_weights()")


def adamw(model: nn.Module) -> AdamW:
    return AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def through_a_file(value: Any) -> Any:
    """Return a value as torch.save and torch.load give it back."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@loop("saves model and optimizer, and resumes with a new model, optimizer and Trainer")
def resumes(run: Run) -> Result:
    """The second half continues as if there had been no interruption."""
    model, optimizer, net = begin(run, optimizer=adamw)
    batches = list(run.batches())
    half = len(batches) // 2
    for inputs, targets in batches[:half]:
        loss = nn.functional.mse_loss(net(inputs), targets)
        run.record(loss)
        step(loss, optimizer)
    saved = through_a_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    if run.trainer is not None:
        run.trainer.close()
        torch.manual_seed(5)  # the new model has other weights until it loads the saved ones
        model = mlp()
        optimizer = adamw(model)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        net = run.attach(model, optimizer)
    for inputs, targets in batches[half:]:
        loss = nn.functional.mse_loss(net(inputs), targets)
        run.record(loss)
        step(loss, optimizer)
    return model, optimizer


@loop("resumes by loading after the Trainer was made (nanoGPT, Hugging Face)", relaxed=EDIT)
def loads_after_trainer(run: Run) -> Result:
    source, of_source, net = begin(run, optimizer=adamw)
    for loss in run.losses(net, steps=run.steps // 2):
        step(loss, of_source)
    saved = through_a_file({"model": source.state_dict(), "optimizer": of_source.state_dict()})
    if run.trainer is not None:
        run.trainer.close()
    torch.manual_seed(5)
    model, optimizer, net = begin(run, optimizer=adamw)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    for loss in run.losses(net, steps=run.steps // 2):
        step(loss, optimizer)
    return model, optimizer


@loop("saves and loads a scheduler beside the optimizer")
def resumes_schedule(run: Run) -> Result:
    model, optimizer, net = begin(run)
    schedule = CosineAnnealingLR(optimizer, run.steps)
    for number, loss in enumerate(run.losses(net)):
        step(loss, optimizer)
        schedule.step()
        if number == 2:
            saved = through_a_file({"optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()})
            optimizer.load_state_dict(saved["optimizer"])
            schedule.load_state_dict(saved["schedule"])
    return model, optimizer


@loop("torch.save(model): the whole model, while it has a Trainer")
def saves_model(run: Run) -> Result:
    model, optimizer, net = begin(run)
    for loss in run.losses(net):
        step(loss, optimizer)
    again = through_a_file(model)
    return model, again, again(torch.ones(1, FEATURES))


@loop("pickles the model")
def pickles(run: Run) -> Result:
    model, optimizer, net = begin(run)
    for loss in run.losses(net):
        step(loss, optimizer)
    again = pickle.loads(pickle.dumps(model))
    return model, again


@loop("trains a copy of the model further, without a Trainer")
def copy_trains_alone(run: Run) -> Result:
    model, optimizer, net = begin(run)
    for loss in run.losses(net):
        step(loss, optimizer)
    other = copy.deepcopy(model)
    alone = momentum(other)
    for inputs, targets in run.batches(2):
        step(nn.functional.mse_loss(other(inputs), targets), alone)
    return model, other


@loop("closes the Trainer and saves the model: it has the updates of all workers", workers_agree=True)
def saves_after_close(run: Run) -> Result:
    model, optimizer, net = begin(run)
    for loss in run.losses(net):
        step(loss, optimizer)
    if run.trainer is not None:
        run.trainer.close()
    return model


@loop("goes on with optimizer.step() after trainer.close(), alone")
def after_close(run: Run) -> Result:
    model, optimizer, net = begin(run)
    for loss in run.losses(net):
        step(loss, optimizer)
    if run.trainer is not None:
        run.trainer.close()
    for _ in range(2):
        step(nn.functional.mse_loss(model(torch.ones(2, FEATURES)), torch.zeros(2, TARGETS)), optimizer)
    return model, optimizer


@loop("loads pretrained weights of a part before the Trainer is made (strict=False)")
def loads_part(run: Run) -> Result:
    network = mlp()
    network.load_state_dict({"0.weight": torch.ones(WIDTH, FEATURES)}, strict=False)
    model, optimizer, net = begin(run, network, optimizer=lambda model: Adam(model.parameters(), lr=0.01))
    for loss in run.losses(net):
        step(loss, optimizer)
    return model
