"""Loops that limit gradients or scale the loss."""

from __future__ import annotations

import torch
from torch.amp import GradScaler
from torch.nn.functional import mse_loss
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import AdamW

from loops.loop import Result, Run, Way, loop, refused
from loops.models import begin, device_type

MAX_NORM = 0.1
USE_TRAINER = refused("Trainer(max_grad_norm=…)")


@loop("clip_grad_norm_ before the step", sync=USE_TRAINER)
def clips_norm(run: Run) -> Result:
    model, optimizer, net = begin(run)
    norms = []
    for loss in run.losses(net):
        loss.backward()
        norms.append(clip_grad_norm_(model.parameters(), MAX_NORM))
        optimizer.step()
        optimizer.zero_grad()
    return model, norms


@loop("Trainer(max_grad_norm=…) in place of clip_grad_norm_")
def clips_in_trainer(run: Run) -> Result:
    model, optimizer, net = begin(run, max_grad_norm=MAX_NORM)
    norms = []
    for loss in run.losses(net):
        loss.backward()
        norm = None if run.trainer is not None else clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        norms.append(getattr(run.trainer, "grad_norm", norm))
        optimizer.zero_grad()
    return model, norms


@loop("Trainer(max_grad_norm=…) with AdamW and two backward passes per step")
def clips_accumulated(run: Run) -> Result:
    model, optimizer, net = begin(
        run, optimizer=lambda model: AdamW(model.parameters(), lr=0.01), max_grad_norm=MAX_NORM
    )
    for number, loss in enumerate(run.losses(net)):
        loss.backward()
        if number % 2:
            if run.trainer is None:
                clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
    return model


@loop("clip_grad_norm_ with Trainer(update_on_kvstore=False)", relaxed=refused("use dist_sync"))
def clips_with_local_update(run: Run) -> Result:
    model, optimizer, net = begin(run, update_on_kvstore=False)
    for loss in run.losses(net):
        loss.backward()
        clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    return model


@loop("clip_grad_value_", sync=USE_TRAINER)
def clips_values(run: Run) -> Result:
    model, optimizer, net = begin(run)
    for loss in run.losses(net):
        loss.backward()
        clip_grad_value_(model.parameters(), 0.02)
        optimizer.step()
        optimizer.zero_grad()
    return model


@loop("clips through p.grad.data.clamp_()", sync=USE_TRAINER)
def clips_data(run: Run) -> Result:
    model, optimizer, net = begin(run)
    for loss in run.losses(net):
        loss.backward()
        for p in model.parameters():
            assert p.grad is not None
            p.grad.data.clamp_(-0.02, 0.02)
        optimizer.step()
        optimizer.zero_grad()
    return model


@loop("clips each gradient by the norm of its weights (AGC)", sync=USE_TRAINER)
def clips_adaptively(run: Run) -> Result:
    model, optimizer, net = begin(run)
    for loss in run.losses(net):
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                assert p.grad is not None
                p.grad.mul_((0.01 * p.norm().clamp(min=0.001) / p.grad.norm()).clamp(max=1.0))
        optimizer.step()
        optimizer.zero_grad()
    return model


@loop("clip_grad_norm_ only from the third step on", sync=USE_TRAINER, relaxed=USE_TRAINER)
def clips_later(run: Run) -> Result:
    model, optimizer, net = begin(run)
    for number, loss in enumerate(run.losses(net)):
        loss.backward()
        if number >= 2:
            clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    return model


@loop("GradScaler: scale, step, update")
def scales_loss(run: Run) -> Result:
    model, optimizer, net = begin(run)
    scaler = GradScaler(device_type(), init_scale=64.0, growth_interval=2)
    for loss in run.losses(net):
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return model, scaler.get_scale()


@loop("GradScaler with a step that all workers skip")
def skips_step(run: Run) -> Result:
    model, optimizer, net = begin(run)
    scaler = GradScaler(device_type(), init_scale=64.0)
    for number, (inputs, targets) in enumerate(run.batches()):
        loss = mse_loss(net(inputs), targets)
        run.record(loss)
        scaler.scale(loss * (float("inf") if number == 2 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return model, scaler.get_scale()


@loop(
    "GradScaler with a step that only one worker would skip",
    differs={Way.SYNC: "leaves out that worker's batch"},
)
def one_skips_step(run: Run) -> Result:
    model, optimizer, net = begin(run)
    scaler = GradScaler(device_type(), init_scale=64.0)
    for number, (inputs, targets) in enumerate(run.batches()):
        loss = mse_loss(net(inputs), targets)
        run.record(loss)
        scaler.scale(loss * (float("inf") if number == 2 and run.rank == 0 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return model, scaler.get_scale()


@loop("GradScaler with unscale_() and clip_grad_norm_", sync=USE_TRAINER)
def scales_and_clips(run: Run) -> Result:
    model, optimizer, net = begin(run)
    scaler = GradScaler(device_type(), init_scale=64.0)
    for loss in run.losses(net):
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return model


@loop("GradScaler with Trainer(max_grad_norm=…)")
def scales_and_clips_in_trainer(run: Run) -> Result:
    model, optimizer, net = begin(run, max_grad_norm=MAX_NORM)
    scaler = GradScaler(device_type(), init_scale=64.0)
    for loss in run.losses(net):
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        if run.trainer is None:
            clip_grad_norm_(model.parameters(), MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return model


@loop("skips a step by hand if the loss is not finite")
def skips_nan_by_hand(run: Run) -> Result:
    """All workers decide together, as they must under DDP, too."""
    model, optimizer, net = begin(run)
    for number, (inputs, targets) in enumerate(run.batches()):
        loss = mse_loss(net(inputs), targets * (float("nan") if number == 2 and run.rank == 0 else 1.0))
        finite = torch.isfinite(run.all_reduce(loss.detach()))
        if finite:
            run.record(loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return model
