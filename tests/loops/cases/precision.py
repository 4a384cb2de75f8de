"""Loops with other dtypes than float32. Servers keep 16-bit weights in float32, so these are equal within rounding."""

from __future__ import annotations

import torch
from torch.nn.functional import mse_loss
from torch.nn.utils import clip_grad_norm_

from loops.loop import Result, Run, loop, refused
from loops.models import begin, device_type, mlp, step


@loop("autocast to bfloat16")
def autocast(run: Run) -> Result:
    model, optimizer, net = begin(run, mlp().float())
    for inputs, targets in run.batches():
        with torch.autocast(device_type(), dtype=torch.bfloat16):
            outputs = net(inputs.float())
        loss = mse_loss(outputs.float(), targets.float())
        run.record(loss)
        step(loss, optimizer)
    return model


@loop("a bfloat16 model", exact=False)
def bfloat16(run: Run) -> Result:
    model, optimizer, net = begin(run, mlp().bfloat16())
    for inputs, targets in run.batches():
        loss = mse_loss(net(inputs.bfloat16()), targets.bfloat16())
        run.record(loss)
        step(loss, optimizer)
    return model


@loop("a bfloat16 model with clip_grad_norm_", exact=False, sync=refused("Trainer(max_grad_norm=…)"))
def bfloat16_clipped(run: Run) -> Result:
    model, optimizer, net = begin(run, mlp().bfloat16())
    for inputs, targets in run.batches():
        loss = mse_loss(net(inputs.bfloat16()), targets.bfloat16())
        run.record(loss)
        loss.backward()
        clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return model


@loop("a float16 model", exact=False)
def float16(run: Run) -> Result:
    model, optimizer, net = begin(run, mlp().half())
    for inputs, targets in run.batches():
        loss = mse_loss(net(inputs.half()), targets.half())
        run.record(loss)
        step(loss, optimizer)
    return model


OTHER_DTYPE = refused("convert the model before the Trainer is created")


@loop(
    "converts the model to bfloat16 after the Trainer was made",
    one=OTHER_DTYPE,
    sync=OTHER_DTYPE,
    collective=OTHER_DTYPE,
    relaxed=OTHER_DTYPE,
)
def converts_later(run: Run) -> Result:
    model, optimizer, net = begin(run)
    model.bfloat16()
    for inputs, targets in run.batches():
        loss = mse_loss(net(inputs.bfloat16()), targets.bfloat16())
        run.record(loss)
        step(loss, optimizer)
    return model


@loop("a float64 model")
def float64(run: Run) -> Result:
    model, optimizer, net = begin(run, mlp().double())
    for inputs, targets in run.batches():
        loss = mse_loss(net(inputs.double()), targets.double())
        run.record(loss)
        step(loss, optimizer)
    return model


@loop("float32 master weights by hand: a bfloat16 model that gets a copy after each step", reads_weights=True)
def master_weights(run: Run) -> Result:
    model, optimizer, net = begin(run, mlp().float())
    half = mlp().bfloat16()
    for inputs, targets in run.batches():
        with torch.no_grad():
            for small, p in zip(half.parameters(), model.parameters(), strict=True):
                small.copy_(p)
        with torch.no_grad():
            offset = half(inputs.bfloat16()).float().mean()
        loss = mse_loss(net(inputs.float()) + 0 * offset, targets.float())
        run.record(loss)
        step(loss, optimizer)
    return model
