"""`echelon bench checkpoint`: what saving costs the steps of a run: not at all, in the background, or before the step.

Blocks of steps take turns: one without saving, one that saves in the background before its first step, one that writes
the file before its first step continues, as runs did before files were written in the background. The order changes
with every round, and files of a block are on the disk before the next one begins: otherwise each kind would always have
the cost of the one before it.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from rich.console import Console
from torch import nn

from echelon.bench.harness.checks import check_numbers
from echelon.bench.harness.results import write_result
from echelon.train.checkpoint.background import BackgroundWriter
from echelon.train.checkpoint.format import Checkpoint, save

LAYERS = 4


def run(args: argparse.Namespace) -> int:
    """Measure, print the seconds per block, and write the result file."""
    check_numbers(args, width=1, batch_size=1, rounds=1, steps=1)
    model = nn.Sequential(*(nn.Linear(args.width, args.width) for _ in range(LAYERS)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    batch = torch.randn(args.batch_size, args.width)

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)  # new memory for gradients costs page faults, which saving can prevent
        model(batch).square().mean().backward()
        optimizer.step()

    step()

    def checkpoint() -> Checkpoint:
        momenta = {str(i): state["momentum_buffer"] for i, state in enumerate(optimizer.state.values())}
        return Checkpoint(dict(model.state_dict()), momenta)

    num_bytes = 2 * sum(parameter.nbytes for parameter in model.parameters())
    with TemporaryDirectory() as folder, BackgroundWriter() as writer:
        path = Path(folder) / "m-0001.safetensors"
        savers: dict[str, Callable[[], None]] = {
            "without saving": lambda: None,
            "in the background": lambda: writer.write(path, checkpoint()),
            "before the step": lambda: save(path, checkpoint()),
        }
        blocks = take_turns(step, savers, args.rounds, args.steps, writer.wait)
    console = Console()
    console.print(f"a checkpoint of {num_bytes / 1e6:.0f} MB before every {args.steps} steps:")
    for name, measured in blocks.items():
        median = statistics.median(block["seconds"] for block in measured)
        held = statistics.median(block["saving_s"] for block in measured)
        low, middle, high = added(measured, blocks["without saving"])
        console.print(
            f"{name:<18} {median / args.steps * 1e3:8.2f} ms per step ({middle:+.1%}, quartiles {low:+.1%} and "
            f"{high:+.1%}); saving held the loop up for {held * 1e3:.1f} ms per checkpoint",
            soft_wrap=True,
        )
    if args.json is not None:
        write_result(args.json, {"checkpoint_bytes": num_bytes, "steps": args.steps, "blocks": blocks})
    return 0


def added(measured: Sequence[Mapping[str, float]], without: Sequence[Mapping[str, float]]) -> list[float]:
    """Return the quartiles of what saving added to a block, as a part of the block without saving of the same round."""
    ratios = [one["seconds"] / other["seconds"] - 1 for one, other in zip(measured, without, strict=True)]
    return statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3


def take_turns(
    step: Callable[[], None],
    savers: Mapping[str, Callable[[], None]],
    rounds: int,
    steps: int,
    wait: Callable[[], None],
) -> dict[str, list[dict[str, float]]]:
    """Measure blocks of steps of each kind in turn; return the seconds of each block, and of its saving."""
    blocks: dict[str, list[dict[str, float]]] = {name: [] for name in savers}
    orders = list(itertools.permutations(savers.items()))
    for number in range(rounds):
        for name, saver in orders[number % len(orders)]:
            wait()
            os.sync()
            step()  # not timed: the first one after a pause is slower
            began = time.perf_counter()
            saver()
            saved = time.perf_counter()
            for _ in range(steps):
                step()
            blocks[name].append({"seconds": time.perf_counter() - began, "saving_s": saved - began})
    return blocks
