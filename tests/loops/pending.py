"""Loops whose outcome is not reached yet, with the reason. Each is expected to fail; one that passes must leave."""

from __future__ import annotations

from loops.loop import Way

PENDING: dict[str, dict[Way, str]] = {
    "calls optimizer.step()": dict.fromkeys(
        [Way.ONE, Way.ASYNC, Way.SSYNC, Way.GSYNC, Way.SYNC, Way.COLLECTIVE],
        "optimizer.step() is not trainer.step() yet",
    ),
    "averages the weights after each step (EMA by hand)": dict.fromkeys(
        [Way.ONE, Way.ASYNC, Way.SSYNC, Way.GSYNC, Way.SYNC, Way.COLLECTIVE],
        "optimizer.step() is not trainer.step() yet",
    ),
    "clamps the weights after each step (WGAN)": dict.fromkeys(
        [Way.ONE, Way.ASYNC, Way.SSYNC, Way.GSYNC, Way.SYNC, Way.COLLECTIVE],
        "optimizer.step() is not trainer.step() yet",
    ),
    "clamps the weights in `with trainer.edit_weights():`": dict.fromkeys(
        [Way.ONE, Way.ASYNC, Way.SSYNC, Way.GSYNC, Way.SYNC, Way.COLLECTIVE],
        "optimizer.step() is not trainer.step() yet",
    ),
    "StepLR": dict.fromkeys(
        [Way.ONE, Way.ASYNC, Way.SSYNC, Way.GSYNC, Way.SYNC, Way.COLLECTIVE],
        "optimizer.step() is not trainer.step() yet",
    ),
    "sets the learning rate between backward() and step() (Noam)": dict.fromkeys(
        [Way.ONE, Way.ASYNC, Way.SSYNC, Way.GSYNC, Way.SYNC, Way.COLLECTIVE],
        "optimizer.step() is not trainer.step() yet",
    ),
    "OneCycleLR, which also changes the momentum": dict.fromkeys(
        [Way.ONE, Way.ASYNC, Way.SSYNC, Way.GSYNC, Way.SYNC, Way.COLLECTIVE],
        "optimizer.step() is not trainer.step() yet",
    ),
    "two backward passes per step: optimizer.step() after every second one": dict.fromkeys(
        [Way.ONE, Way.ASYNC, Way.SSYNC, Way.GSYNC, Way.SYNC, Way.COLLECTIVE],
        "optimizer.step() is not trainer.step() yet",
    ),
    "clip_grad_norm_ before the step": dict.fromkeys(
        [Way.ONE, Way.ASYNC, Way.SSYNC, Way.GSYNC, Way.SYNC, Way.COLLECTIVE],
        "optimizer.step() is not trainer.step() yet",
    ),
    "clips with Trainer(max_grad_norm=…) in place of clip_grad_norm_": dict.fromkeys(
        [Way.ONE, Way.ASYNC, Way.SSYNC, Way.GSYNC, Way.SYNC, Way.COLLECTIVE],
        "optimizer.step() is not trainer.step() yet",
    ),
}
