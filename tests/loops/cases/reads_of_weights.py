"""Loops that read weights outside of the forward pass. Each expects the weights of the last step."""

from __future__ import annotations

import copy
import io
import warnings

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, mse_loss
from torch.nn.utils import parameters_to_vector
from torch.optim import Adam
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn

from loops.kinds import FEATURES, TARGETS
from loops.loop import ALONE, Result, Run, loop
from loops.models import WIDTH, begin, momentum, step


@loop("averages the weights after each step (EMA by hand)", reads_weights=True)
def ema_by_hand(run: Run) -> Result:
    model, optimizer, net = begin(run)
    average = [p.detach().clone() for p in model.parameters()]
    for loss in run.losses(net):
        step(loss, optimizer)
        for mean, p in zip(average, model.parameters(), strict=True):
            mean.mul_(0.9).add_(p.detach(), alpha=0.1)
    return model, average


@loop("AveragedModel with EMA, updated after each step", reads_weights=True)
def averaged_model(run: Run) -> Result:
    model, optimizer, net = begin(run)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for loss in run.losses(net):
        step(loss, optimizer)
        averaged.update_parameters(model)
    return model, averaged


@loop("SWA: AveragedModel, SWALR and update_bn at the end", reads_weights=True)
def swa(run: Run) -> Result:
    layers = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.Linear(WIDTH, TARGETS))
    model, optimizer, net = begin(run, layers)
    averaged, schedule = AveragedModel(model), SWALR(optimizer, swa_lr=0.01, anneal_epochs=2)
    for loss in run.losses(net):
        step(loss, optimizer)
        averaged.update_parameters(model)
        schedule.step()
    update_bn(list(run.batches()), averaged)
    return model, averaged


@loop("copies the model after each step (deepcopy)", reads_weights=True)
def deep_copies(run: Run) -> Result:
    model, optimizer, net = begin(run)
    outputs = []
    for loss in run.losses(net):
        step(loss, optimizer)
        outputs.append(copy.deepcopy(model)(torch.ones(1, FEATURES)))
    return model, outputs


@loop("state_dict() of a part of the model after each step", reads_weights=True)
def state_of_part(run: Run) -> Result:
    model, optimizer, net = begin(run)
    states = []
    for loss in run.losses(net):
        step(loss, optimizer)
        states.append({name: value.clone() for name, value in next(model.children()).state_dict().items()})
    return model, states


@loop("saves the model after each step (torch.save)", reads_weights=True)
def saves_each_step(run: Run) -> Result:
    model, optimizer, net = begin(run)
    loaded = []
    for loss in run.losses(net):
        step(loss, optimizer)
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        file.seek(0)
        loaded.append(torch.load(file))
    return model, loaded


@loop("adds a penalty on the weights to the loss", reads_weights=True, reference=ALONE)
def penalty(run: Run) -> Result:
    """Computed before the forward pass. DDP needs the forward pass first, so the reference is one process."""
    model, optimizer, net = begin(run)
    for inputs, targets in run.batches():
        size = sum((p.square().sum() for p in model.parameters()), torch.zeros(()))
        loss = mse_loss(net(inputs), targets) + 0.01 * size
        run.record(loss)
        step(loss, optimizer)
    return model


@loop("measures how far each step moved the weights (parameters_to_vector)", reads_weights=True)
def moved(run: Run) -> Result:
    model, optimizer, net = begin(run)
    distances = []
    before = parameters_to_vector(model.parameters()).detach()
    for loss in run.losses(net):
        step(loss, optimizer)
        after = parameters_to_vector(model.parameters()).detach()
        distances.append((after - before).norm())
        before = after
    return model, distances


@loop("reads weights through p.data and NumPy", reads_weights=True)
def through_numpy(run: Run) -> Result:
    model, optimizer, net = begin(run)
    sums = []
    for loss in run.losses(net):
        step(loss, optimizer)
        sums.append([float(p.data.cpu().numpy().sum()) for p in model.parameters()])
    return model, sums


class TiedHead(nn.Module):
    """Reads the weights of its head as an embedding, before the head runs (nanoGPT's tied weights)."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 11, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        tokens = (inputs.abs() * 10).long() % 11
        outputs: Tensor = self.head(torch.tanh(self.mix(embedding(tokens, self.head.weight).mean(1))))
        return outputs[:, :TARGETS]


@loop("F.embedding(tokens, self.head.weight) before self.head runs", reads_weights=True)
def tied_head(run: Run) -> Result:
    model, optimizer, net = begin(run, TiedHead(), optimizer=lambda model: Adam(model.parameters(), lr=0.02))
    for loss in run.losses(net):
        step(loss, optimizer)
    return model


class DetachedFirst(nn.Module):
    """Uses a detached weight before the layer that has it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, FEATURES)
        self.last = nn.Linear(FEATURES, TARGETS)

    def forward(self, inputs: Tensor) -> Tensor:
        frozen = inputs @ self.first.weight.detach().T
        outputs: Tensor = self.last(torch.tanh(self.first(inputs) + 0.1 * frozen))
        return outputs


@loop("uses a detached weight earlier in the same forward pass", reads_weights=True)
def detached_first(run: Run) -> Result:
    model, optimizer, net = begin(run, DetachedFirst())
    for loss in run.losses(net):
        step(loss, optimizer)
    return model


@loop("evaluates between steps, with model.eval() and no_grad()", reads_weights=True)
def evaluates(run: Run) -> Result:
    model, optimizer, net = begin(
        run, nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.Dropout(0.2), nn.Linear(WIDTH, TARGETS))
    )
    scores = []
    for loss in run.losses(net):
        step(loss, optimizer)
        model.eval()
        with torch.no_grad():
            scores += [mse_loss(model(inputs), targets) for inputs, targets in run.batches(2)]
        model.train()
    return model, scores


@loop("evaluates under inference_mode()", reads_weights=True)
def inference_mode(run: Run) -> Result:
    model, optimizer, net = begin(run)
    scores = []
    for loss in run.losses(net):
        step(loss, optimizer)
        with torch.inference_mode():
            scores.append(float(model(torch.ones(2, FEATURES)).sum()))
    return model, scores


@loop("torch.func.functional_call with the model's parameters", reads_weights=True, reference=ALONE)
def functional(run: Run) -> Result:
    model, optimizer, _ = begin(run)
    for inputs, targets in run.batches():
        outputs = torch.func.functional_call(model, dict(model.named_parameters()), (inputs,))
        loss = mse_loss(outputs, targets)
        run.record(loss)
        step(loss, optimizer)
    return model


@loop("traces the model between steps (torch.jit.trace)", reads_weights=True)
def traces(run: Run) -> Result:
    model, optimizer, net = begin(run)
    outputs = []
    for loss in run.losses(net):
        step(loss, optimizer)
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
            traced = torch.jit.trace(model, torch.ones(2, FEATURES))
        outputs.append(traced(torch.ones(2, FEATURES)))
    return model, outputs


@loop("a student learns from a copy of the model of some steps ago", reads_weights=True)
def self_distillation(run: Run) -> Result:
    model, optimizer, net = begin(run)
    teacher = copy.deepcopy(model)
    for number, (inputs, targets) in enumerate(run.batches()):
        loss = mse_loss(net(inputs), 0.5 * targets + 0.5 * teacher(inputs).detach())
        run.record(loss)
        step(loss, optimizer)
        if number % 2:
            teacher = copy.deepcopy(model)
    return model


@loop("keeps views of the weights from before the Trainer existed", reads_weights=True)
def kept_views(run: Run) -> Result:
    model = nn.Linear(FEATURES, TARGETS)
    view = model.weight.detach()[0]
    optimizer = momentum(model)
    net = run.attach(model, optimizer)
    seen = []
    for loss in run.losses(net):
        step(loss, optimizer)
        seen.append(view.clone())
    return model, seen
