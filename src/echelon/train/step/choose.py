"""Which engine runs the steps: a decision with its reason, taken once before training.

eager: the host launches every kernel. graph: the whole step is captured once and replayed. compile: Inductor makes the
kernels (about a minute at the start, kept for next time), and the step is captured where it can be. auto takes the
fastest that pays for itself: compiling only for runs of many steps.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

log = logging.getLogger(__name__)

COMPILING_PAYS_AFTER = 5_000  # steps: it costs about a minute and saves about 1 to 5 ms a step
REMIND_S = 20.0


@dataclass(frozen=True, slots=True)
class Choice:
    """How steps are run, and the sentence that says why."""

    captured: bool
    compiled: bool
    reason: str

    @property
    def name(self) -> str:
        """As `--engine` has it."""
        return "compile" if self.compiled else "graph" if self.captured else "eager"

    def __str__(self) -> str:
        how = {"compile": "compiled, then captured" if self.captured else "compiled"}.get(self.name, self.name)
        return f"engine {how}: {self.reason}"


def choose_engine(asked: str, device: str, obstacle: str | None, num_steps: int) -> Choice:
    """Decide. `obstacle` is what keeps a step from being captured, or None."""
    on_gpu = device == "cuda"
    if not on_gpu:
        obstacle = "graphs are captured on a GPU, and this is the CPU"
    capturable = obstacle is None
    if asked == "eager":
        return Choice(False, False, "as --engine says")
    if asked == "graph":
        return Choice(capturable, False, f"not captured, {obstacle}" if obstacle else "as --engine says")
    if asked == "compile":
        return Choice(capturable, True, f"not captured, {obstacle}" if obstacle else "as --engine says")
    if not on_gpu:
        return Choice(False, False, "on a CPU the kernels take much longer than launching them")
    long = num_steps >= COMPILING_PAYS_AFTER
    steps = f"{num_steps:,} steps are {'enough' if long else 'too few'} to pay for compiling"
    return Choice(capturable, long, f"{steps}; not captured, {obstacle}" if obstacle else steps)


@contextmanager
def patience(what: str) -> Iterator[None]:
    """Say that something long has begun, now and then that it goes on, and how long it took."""
    began, done = time.monotonic(), threading.Event()

    def remind() -> None:
        while not done.wait(REMIND_S):
            log.info("still %s, %.0f s", what, time.monotonic() - began)

    log.info("%s …", what)
    thread = threading.Thread(target=remind, name="patience", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        log.info("%s took %.0f s", what, time.monotonic() - began)
