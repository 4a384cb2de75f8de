"""Loops that read or change gradients, make several backward passes, or train some parameters only at times."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from loops.kinds import FEATURES, TARGETS
from loops.loop import ALONE, Result, Run, loop, refused
from loops.models import WIDTH, begin, step

TOO_LATE = refused("with trainer.accumulate():")
LOCAL = refused("Trainer(local_gradient_edits=True)")


@loop("two backward passes per step, no block around the first")
def accumulates(run: Run) -> Result:
    model, optimizer, net = begin(run)
    for number, loss in enumerate(run.losses(net)):
        (loss / 2).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    return model


@loop("two backward passes per step, the first in `with trainer.accumulate():`")
def accumulates_in_block(run: Run) -> Result:
    model, optimizer, net = begin(run)
    for number, (inputs, targets) in enumerate(run.batches()):
        if number % 2 == 0:
            with run.accumulate(net):
                loss = mse_loss(net(inputs), targets)
                run.record(loss)
                loss.backward()
            continue
        loss = mse_loss(net(inputs), targets)
        run.record(loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@loop("one backward pass in the first step, two in the next, then three", sync=TOO_LATE, relaxed=TOO_LATE)
def accumulates_more_and_more(run: Run) -> Result:
    model, optimizer, net = begin(run)
    for number, loss in enumerate(run.losses(net)):
        loss.backward()
        if number in (0, 2, 5) or number > 5:
            optimizer.step()
            optimizer.zero_grad()
    return model


@loop("two losses with a backward pass each (retain_graph=True)", reference=ALONE)
def two_losses(run: Run) -> Result:
    model, optimizer, net = begin(run)
    for inputs, targets in run.batches():
        outputs = net(inputs)
        loss = mse_loss(outputs, targets)
        run.record(loss)
        loss.backward(retain_graph=True)
        outputs.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@loop("reads the norm of its gradients for a log")
def logs_norms(run: Run) -> Result:
    model, optimizer, net = begin(run)
    norms = []
    for loss in run.losses(net):
        loss.backward()
        norms.append([float(p.grad.norm()) for p in model.parameters() if p.grad is not None])
        optimizer.step()
        optimizer.zero_grad()
    return model, len(norms), all(value > 0 for step in norms for value in step)


@loop("reads gradients after the step")
def reads_after_step(run: Run) -> Result:
    model, optimizer, net = begin(run)
    given = []
    for loss in run.losses(net):
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        given.append(sum(p.grad is not None for p in model.parameters()))
    return model, given


@loop("halves its gradients (p.grad.mul_(0.5)): linear, so it also halves the mean")
def halves(run: Run) -> Result:
    model, optimizer, net = begin(run)
    for loss in run.losses(net):
        loss.backward()
        for p in model.parameters():
            assert p.grad is not None
            p.grad.mul_(0.5)
        optimizer.step()
        optimizer.zero_grad()
    return model


@loop("divides its gradients by a number (p.grad /= 4)")
def divides(run: Run) -> Result:
    model, optimizer, net = begin(run)
    for loss in run.losses(net):
        loss.backward()
        for p in model.parameters():
            assert p.grad is not None
            p.grad /= 4
        optimizer.step()
        optimizer.zero_grad()
    return model


@loop("adds noise to its gradients", sync=LOCAL)
def noise(run: Run) -> Result:
    model, optimizer, net = begin(run)
    for loss in run.losses(net):
        loss.backward()
        for p in model.parameters():
            assert p.grad is not None
            p.grad.add_(torch.randn_like(p), alpha=0.01)
        optimizer.step()
        optimizer.zero_grad()
    return model


@loop("adds noise to its gradients, with Trainer(local_gradient_edits=True)")
def local_noise(run: Run) -> Result:
    """All workers add the same noise, so that it is also the noise of the mean."""
    model, optimizer, net = begin(run, local_gradient_edits=True)
    for loss in run.losses(net):
        loss.backward()
        for p in model.parameters():
            assert p.grad is not None
            p.grad.add_(torch.randn_like(p), alpha=0.01)
        optimizer.step()
        optimizer.zero_grad()
    return model


@loop("replaces its gradients (p.grad = p.grad.sign())", sync=LOCAL)
def replaces(run: Run) -> Result:
    model, optimizer, net = begin(run)
    for loss in run.losses(net):
        loss.backward()
        for p in model.parameters():
            assert p.grad is not None
            p.grad = p.grad.sign() * 0.1
        optimizer.step()
        optimizer.zero_grad()
    return model


@loop("sets a row of a gradient to 0 (p.grad[0] = 0)", sync=LOCAL)
def zeroes_row(run: Run) -> Result:
    model, optimizer, net = begin(run)
    for loss in run.losses(net):
        loss.backward()
        for p in model.parameters():
            assert p.grad is not None
            p.grad[0] = 0
        optimizer.step()
        optimizer.zero_grad()
    return model


@loop("subtracts the mean of a gradient through p.grad.data", sync=LOCAL)
def centralizes(run: Run) -> Result:
    model, optimizer, net = begin(run)
    for loss in run.losses(net):
        loss.backward()
        for p in model.parameters():
            assert p.grad is not None
            p.grad.data.sub_(p.grad.data.mean())
        optimizer.step()
        optimizer.zero_grad()
    return model


@loop("computes gradients with autograd.grad and sets p.grad", reference=ALONE)
def by_hand(run: Run) -> Result:
    model, optimizer, net = begin(run)
    for loss in run.losses(net):
        found = torch.autograd.grad(loss, list(model.parameters()))
        for p, gradient in zip(model.parameters(), found, strict=True):
            p.grad = gradient
        optimizer.step()
        optimizer.zero_grad()
    return model


@loop("sets p.grad without any forward pass of the model (evolution strategies)", reference=ALONE)
def without_forward(run: Run) -> Result:
    model, optimizer, _ = begin(run)
    for _ in range(run.steps):
        loss = sum((p.detach().square().sum() for p in model.parameters()), torch.zeros(()))
        run.record(loss)
        for p in model.parameters():
            p.grad = 2 * p.detach()
        optimizer.step()
        optimizer.zero_grad()
    return model


@loop("a hook on a parameter that changes its gradient")
def parameter_hook(run: Run) -> Result:
    model, optimizer, net = begin(run)
    for p in model.parameters():
        p.register_hook(lambda gradient: gradient.clamp(-0.05, 0.05))
    for loss in run.losses(net):
        step(loss, optimizer)
    return model


@loop("register_post_accumulate_grad_hook, which counts")
def accumulate_hook(run: Run) -> Result:
    model, optimizer, net = begin(run)
    calls = []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: calls.append(p.numel()))
    for loss in run.losses(net):
        step(loss, optimizer)
    return model, sum(calls)


@loop("forward and backward hooks on modules")
def module_hooks(run: Run) -> Result:
    model, optimizer, net = begin(run)
    seen: list[Tensor] = []
    last = list(model.children())[-1]
    last.register_forward_hook(lambda module, inputs, outputs: outputs * 1.1)

    def note(module: nn.Module, inputs: Any, outputs: Any) -> None:
        seen.append(outputs[0].sum())

    last.register_full_backward_hook(note)
    for loss in run.losses(net):
        step(loss, optimizer)
    return model, seen


@loop("a gradient penalty: a gradient of a gradient (WGAN-GP)")
def gradient_penalty(run: Run) -> Result:
    model, optimizer, net = begin(run)
    for inputs, targets in run.batches():
        inputs.requires_grad_()
        outputs = net(inputs)
        slope = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)[0]
        loss = mse_loss(outputs, targets) + 0.1 * (slope.norm(dim=1) - 1).square().mean()
        run.record(loss)
        step(loss, optimizer)
    return model


class TwoBranches(nn.Module):
    """Uses one of two layers in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(FEATURES, TARGETS) for _ in range(2))
        self.use = 0

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.branches[self.use](inputs)
        return outputs


@loop("a layer that only every second step uses")
def unused_layer(run: Run) -> Result:
    network = TwoBranches()
    model, optimizer, net = begin(run, network, ddp={"find_unused_parameters": True})
    for loss in run.losses(net):
        step(loss, optimizer)
        network.use = 1 - network.use
    return model


@loop("a layer that only one worker uses")
def layer_of_one_worker(run: Run) -> Result:
    network = TwoBranches()
    network.use = run.rank
    model, optimizer, net = begin(run, network, ddp={"find_unused_parameters": True})
    for loss in run.losses(net):
        step(loss, optimizer)
    return model


@loop("freezes a layer in the middle of training", reference=ALONE)
def freezes(run: Run) -> Result:
    model, optimizer, net = begin(run)
    for number, loss in enumerate(run.losses(net)):
        step(loss, optimizer)
        if number == 2:
            next(model.children()).requires_grad_(False)
    return model


FROZEN = refused("create another one after requires_grad_(True)")


@loop("trains a layer that was frozen at the start (thawing)", reference=ALONE, one=FROZEN, sync=FROZEN, relaxed=FROZEN)
def thaws(run: Run) -> Result:
    network = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, TARGETS))
    network[0].requires_grad_(False)
    model, optimizer, net = begin(run, network)
    for number, loss in enumerate(run.losses(net)):
        step(loss, optimizer)
        if number == 2:
            network[0].requires_grad_(True)
    return model


@loop("freezes and thaws a layer in turn", reference=ALONE)
def in_turn(run: Run) -> Result:
    network = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, TARGETS))
    model, optimizer, net = begin(run, network)
    for number, loss in enumerate(run.losses(net)):
        step(loss, optimizer)
        network[0].requires_grad_(number % 2 == 1)
    return model
