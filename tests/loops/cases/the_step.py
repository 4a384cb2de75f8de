"""How a loop ends a step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import mse_loss

from loops.loop import ALONE, Result, Run, loop, refused
from loops.models import begin, momentum, step


@loop("optimizer.zero_grad(), backward(), optimizer.step(): PyTorch's tutorial")
def optimizer_step(run: Run) -> Result:
    model, optimizer, net = begin(run)
    for loss in run.losses(net):
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


@loop("trainer.step(batch_size), which also clears the gradients")
def trainer_step(run: Run) -> Result:
    model, optimizer, net = begin(run)
    for loss in run.losses(net):
        loss.backward()
        if run.trainer is not None:
            run.trainer.step(8)
        else:
            optimizer.step()
            optimizer.zero_grad()
    return model


@loop("trainer.step() in some steps, optimizer.step() in others")
def mixed_steps(run: Run) -> Result:
    model, optimizer, net = begin(run)
    for number, loss in enumerate(run.losses(net)):
        optimizer.zero_grad()
        loss.backward()
        if run.trainer is not None and number % 2:
            run.trainer.step()
        else:
            optimizer.step()
    return model


@loop("Trainer(overlap=False)")
def no_overlap(run: Run) -> Result:
    model, optimizer, net = begin(run, overlap=False)
    for loss in run.losses(net):
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


@loop("Trainer(overlap=True): gradients are sent during backward from the first step")
def with_overlap(run: Run) -> Result:
    model, optimizer, net = begin(run, overlap=True)
    for loss in run.losses(net):
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


@loop("Trainer(lazy_pull=True), and reads weights only in the forward pass")
def lazy_pull(run: Run) -> Result:
    model, optimizer, net = begin(run, lazy_pull=True)
    for loss in run.losses(net):
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


@loop("model.zero_grad() in place of optimizer.zero_grad()")
def model_zero_grad(run: Run) -> Result:
    model, optimizer, net = begin(run)
    for loss in run.losses(net):
        model.zero_grad()
        loss.backward()
        optimizer.step()
    return model


@loop("zero_grad(set_to_none=False)")
def zeros_in_place(run: Run) -> Result:
    model, optimizer, net = begin(run)
    for loss in run.losses(net):
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        optimizer.step()
    return model


@loop("zero_grad() before the forward pass")
def zero_grad_first(run: Run) -> Result:
    model, optimizer, net = begin(run)
    for inputs, targets in run.batches():
        optimizer.zero_grad()
        loss = mse_loss(net(inputs), targets)
        run.record(loss)
        loss.backward()
        optimizer.step()
    return model


@loop("never clears its gradients: each step has the sum of all gradients so far", learns=False)
def never_clears(run: Run) -> Result:
    model, optimizer, net = begin(run, optimizer=lambda model: momentum(model, lr=0.001))
    for loss in run.losses(net):
        loss.backward()
        optimizer.step()
    return model


TOO_LATE = refused("Trainer(overlap=False)")


@loop("zero_grad() in place of step() at times, after the first step", sync=TOO_LATE, relaxed=TOO_LATE)
def skips_steps(run: Run) -> Result:
    model, optimizer, net = begin(run)
    for number, loss in enumerate(run.losses(net)):
        loss.backward()
        if number % 3 != 2:
            optimizer.step()
        optimizer.zero_grad()
    return model


@loop("zero_grad() in place of step() at times, with Trainer(overlap=False)")
def skips_steps_without_overlap(run: Run) -> Result:
    model, optimizer, net = begin(run, overlap=False)
    for number, loss in enumerate(run.losses(net)):
        loss.backward()
        if number % 3 != 2:
            optimizer.step()
        optimizer.zero_grad()
    return model


@loop("optimizer.step(closure) with SGD")
def closure(run: Run) -> Result:
    model, optimizer, net = begin(run)
    returned = []
    for inputs, targets in run.batches():

        def compute(inputs: Tensor = inputs, targets: Tensor = targets) -> Any:
            optimizer.zero_grad()
            loss = mse_loss(net(inputs), targets)
            loss.backward()
            run.record(loss)
            return loss

        returned.append(optimizer.step(compute))
    return model, returned


@loop("steps through a reference that it kept: step = optimizer.step")
def kept_reference(run: Run) -> Result:
    model, optimizer, net = begin(run)
    update = optimizer.step
    for loss in run.losses(net):
        optimizer.zero_grad()
        loss.backward()
        update()
    return model


@loop("calls the layers of the model, never the model", reference=ALONE)
def calls_layers(run: Run) -> Result:
    model, optimizer, _ = begin(run)
    first, _, last = model.children()
    for inputs, targets in run.batches():
        loss = mse_loss(last(torch.tanh(first(inputs))), targets)
        run.record(loss)
        step(loss, optimizer)
    return model
