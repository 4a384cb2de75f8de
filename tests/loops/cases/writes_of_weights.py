"""Loops that change weights themselves. An edit that is the same on all workers is sent with the next step."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from loops.kinds import FEATURES, TARGETS
from loops.loop import Result, Run, Way, loop, refused
from loops.models import WIDTH, begin, mlp, step

EDIT = refused("trainer.edit_weights()")
NOT_THE_SAME = refused("not to the same values")


def last_layer(model: nn.Module) -> nn.Linear:
    """Return the last layer of `mlp`."""
    layer = list(model.children())[-1]
    assert isinstance(layer, nn.Linear)
    return layer


@loop("clamps the weights after each step (WGAN)", reads_weights=True, relaxed=EDIT)
def clamps(run: Run) -> Result:
    model, optimizer, net = begin(run)
    for loss in run.losses(net):
        step(loss, optimizer)
        with torch.no_grad():
            for p in model.parameters():
                p.clamp_(-0.3, 0.3)
    return model


@loop("clamps the weights through p.data", reads_weights=True, relaxed=EDIT)
def clamps_data(run: Run) -> Result:
    model, optimizer, net = begin(run)
    for loss in run.losses(net):
        step(loss, optimizer)
        for p in model.parameters():
            p.data.clamp_(-0.3, 0.3)
    return model


@loop("clamps the weights in `with trainer.edit_weights():`", reads_weights=True)
def clamps_in_block(run: Run) -> Result:
    model, optimizer, net = begin(run)
    for loss in run.losses(net):
        step(loss, optimizer)
        with run.edit_weights():
            for p in model.parameters():
                p.data.clamp_(-0.3, 0.3)
    return model


@loop("limits the norm of each row of a layer (max-norm)", reads_weights=True, relaxed=EDIT)
def max_norm(run: Run) -> Result:
    model, optimizer, net = begin(run)
    for loss in run.losses(net):
        step(loss, optimizer)
        for layer in (layer for layer in model.modules() if isinstance(layer, nn.Linear)):
            layer.weight.data = torch.renorm(layer.weight.data, 2, 0, 0.5)
    return model


class MaxNormEmbedding(nn.Module):
    """An embedding that shortens the rows it reads, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, WIDTH, max_norm=0.5)
        self.last = nn.Linear(WIDTH, TARGETS)

    def forward(self, inputs: Tensor) -> Tensor:
        tokens = (inputs.abs() * 10).long() % 5
        outputs: Tensor = self.last(self.embedding(tokens).mean(1))
        return outputs


@loop("nn.Embedding(max_norm=…), all rows in each batch", reads_weights=True, relaxed=EDIT)
def embedding_max_norm(run: Run) -> Result:
    model, optimizer, net = begin(run, MaxNormEmbedding())
    for loss in run.losses(net):
        step(loss, optimizer)
    return model


@loop("initialises a layer again, with the same seed on all workers", reads_weights=True, relaxed=EDIT)
def resets_layer(run: Run) -> Result:
    model, optimizer, net = begin(run)
    for number, loss in enumerate(run.losses(net)):
        step(loss, optimizer)
        if number == 2:
            last_layer(model).reset_parameters()
    return model


@loop("initialises a layer again, differently on each worker", reads_weights=True, sync=NOT_THE_SAME, relaxed=EDIT)
def resets_differently(run: Run) -> Result:
    model, optimizer, net = begin(run)
    for number, loss in enumerate(run.losses(net)):
        step(loss, optimizer)
        if number == 2:
            torch.manual_seed(run.rank)
            last_layer(model).reset_parameters()
    return model


@loop("initialises a layer differently on each worker in `with trainer.edit_weights():`", reads_weights=True)
def resets_in_block(run: Run) -> Result:
    model, optimizer, net = begin(run)
    for number, loss in enumerate(run.losses(net)):
        step(loss, optimizer)
        if number == 2:
            torch.manual_seed(run.rank)
            with run.edit_weights():
                last_layer(model).reset_parameters()
    return model


@loop("assigns p.data", reads_weights=True, relaxed=EDIT)
def assigns_data(run: Run) -> Result:
    model, optimizer, net = begin(run)
    for number, loss in enumerate(run.losses(net)):
        step(loss, optimizer)
        if number % 2:
            for p in model.parameters():
                p.data = p.data * 0.9
    return model


@loop("vector_to_parameters(), which gives the parameters other memory", reads_weights=True, relaxed=EDIT)
def from_vector(run: Run) -> Result:
    model, optimizer, net = begin(run)
    for loss in run.losses(net):
        step(loss, optimizer)
        vector_to_parameters(parameters_to_vector(model.parameters()).detach() * 0.95, model.parameters())
    return model


@loop("model.double().float(): other memory, the same values", reads_weights=True)
def double_float(run: Run) -> Result:
    model, optimizer, net = begin(run)
    dtype = torch.get_default_dtype()
    for number, loss in enumerate(run.losses(net)):
        step(loss, optimizer)
        if number == 1:
            model.double().to(dtype)
    return model


@loop("model.share_memory()", reads_weights=True)
def share_memory(run: Run) -> Result:
    model, optimizer, net = begin(run)
    for number, loss in enumerate(run.losses(net)):
        step(loss, optimizer)
        if number == 1:
            model.share_memory()
    return model


@loop("swaps averaged weights in to evaluate, and the trained ones back", reads_weights=True)
def swaps(run: Run) -> Result:
    model, optimizer, net = begin(run)
    average = copy.deepcopy(model.state_dict())
    scores = []
    for loss in run.losses(net):
        step(loss, optimizer)
        for name, value in model.state_dict().items():
            average[name].lerp_(value, 0.2)
        trained = copy.deepcopy(model.state_dict())
        model.load_state_dict(average)
        with torch.no_grad():
            scores.append(model(torch.ones(1, FEATURES)))
        model.load_state_dict(trained)
    return model, scores


@loop("keeps the best weights and loads them at the end", reads_weights=True)
def restores_best(run: Run) -> Result:
    model, optimizer, net = begin(run)
    best, kept = float("inf"), copy.deepcopy(model.state_dict())
    for loss in run.losses(net):
        step(loss, optimizer)
        with torch.no_grad():
            score = float(mse_loss(model(torch.ones(1, FEATURES)), torch.zeros(1, TARGETS)))
        if score < best:
            best, kept = score, copy.deepcopy(model.state_dict())
    model.load_state_dict(kept)
    return model


@loop("goes back to earlier weights and continues (model.load_state_dict)", reads_weights=True, relaxed=EDIT)
def goes_back(run: Run) -> Result:
    model, optimizer, net = begin(run)
    kept = copy.deepcopy(model.state_dict())
    for number, loss in enumerate(run.losses(net)):
        step(loss, optimizer)
        if number == 1:
            kept = copy.deepcopy(model.state_dict())
        if number == 3:
            model.load_state_dict(kept)
    return model


@loop("Lookahead by hand: every third step, weights go half way back", reads_weights=True, relaxed=EDIT)
def lookahead(run: Run) -> Result:
    model, optimizer, net = begin(run)
    slow = [p.detach().clone() for p in model.parameters()]
    for number, loss in enumerate(run.losses(net), start=1):
        step(loss, optimizer)
        if number % 3 == 0:
            with torch.no_grad():
                for s, p in zip(slow, model.parameters(), strict=True):
                    s.lerp_(p, 0.5)
                    p.copy_(s)
    return model


@loop("weight decay by hand: p.mul_(1 - lr * decay) before the step", reads_weights=True, relaxed=EDIT)
def decay_by_hand(run: Run) -> Result:
    model, optimizer, net = begin(run)
    for loss in run.losses(net):
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.99)
        optimizer.step()
        optimizer.zero_grad()
    return model


@loop("multiplies weights with a mask after each step (pruning by hand)", reads_weights=True, relaxed=EDIT)
def masks(run: Run) -> Result:
    model, optimizer, net = begin(run)
    masks = [(p.detach().abs() > 0.1).to(p.dtype) for p in model.parameters()]
    for loss in run.losses(net):
        step(loss, optimizer)
        for mask, p in zip(masks, model.parameters(), strict=True):
            p.data.mul_(mask)
    return model


@loop("adds noise to the weights after each step (SGLD)", reads_weights=True, relaxed=EDIT)
def noise(run: Run) -> Result:
    model, optimizer, net = begin(run)
    for loss in run.losses(net):
        step(loss, optimizer)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p), alpha=0.01)
    return model


@loop("other weights for forward and backward, restored before the step (BinaryConnect)", reads_weights=True)
def binary_connect(run: Run) -> Result:
    model, optimizer, net = begin(run)
    for inputs, targets in run.batches():
        real = [p.detach().clone() for p in model.parameters()]
        for p in model.parameters():
            p.data.copy_(p.data.sign() * 0.3)
        loss = mse_loss(net(inputs), targets)
        run.record(loss)
        loss.backward()
        for kept, p in zip(real, model.parameters(), strict=True):
            p.data.copy_(kept)
        optimizer.step()
        optimizer.zero_grad()
    return model


@loop(
    "two passes per step, the second at weights moved along the gradient (SAM)",
    reads_weights=True,
    differs={Way.SYNC: "each worker moves along its own gradient"},
)
def sam(run: Run) -> Result:
    model, optimizer, net = begin(run, mlp())
    for inputs, targets in run.batches():
        loss = mse_loss(net(inputs), targets)
        run.record(loss)
        loss.backward()
        before = [p.detach().clone() for p in model.parameters()]
        with torch.no_grad():
            for p in model.parameters():
                assert p.grad is not None
                p.add_(p.grad, alpha=0.05)
        optimizer.zero_grad()
        mse_loss(net(inputs), targets).backward()
        with torch.no_grad():
            for kept, p in zip(before, model.parameters(), strict=True):
                p.copy_(kept)
        optimizer.step()
        optimizer.zero_grad()
    return model
