"""What the harness and a contender's process say to each other, one line at a time, over stdin and stdout.

    harness → process    run K      do K steps now, together with the other processes of the contender
                         quit       end; the end of the stream means the same, so nothing outlives a killed harness
    process → harness    {"ready": true}          once, when a first step could be done
                         {"step_s": [0.1, …]}     after each `run K`: K times in seconds; training adds
                                                  "losses": [2.3, …], one a step

Between two lines a process blocks on its stdin and costs no CPU. Any other line it prints is kept for error messages;
an answer may follow a prefix (a launcher's role and rank), so answers are looked for from the first brace on.
The module needs only the standard library, and imports nothing of Echelon.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

QUIT = "quit\n"


@dataclass(frozen=True, slots=True)
class Ready:
    """The process has started, and waits for its first command."""


@dataclass(frozen=True, slots=True)
class Times:
    """How long each step of one round took, and where there is a loss, what it was."""

    step_s: tuple[float, ...]
    losses: tuple[float, ...] = ()


Answer = Ready | Times


def run_command(num_steps: int) -> str:
    """The line that asks for a round."""
    return f"run {num_steps}\n"


def encode_answer(answer: Answer) -> str:
    """The line `decode_answer` reads."""
    if isinstance(answer, Ready):
        return json.dumps({"ready": True}) + "\n"
    losses = {"losses": answer.losses} if answer.losses else {}
    return json.dumps({"step_s": answer.step_s, **losses}) + "\n"


def decode_answer(line: str) -> Answer | None:
    """The answer in a line of output, or None for a line that is something else."""
    start = line.find("{")
    try:
        body = json.loads(line[start:]) if start >= 0 else None
        if isinstance(body, dict) and body.get("ready") is True:
            return Ready()
        if isinstance(body, dict) and isinstance(body.get("step_s"), list):
            return Times(_numbers(body["step_s"]), _numbers(body.get("losses", [])))
    except (ValueError, TypeError):
        pass
    return None


def _numbers(values: Sequence[object]) -> tuple[float, ...]:
    return tuple(float(value) for value in values)  # type: ignore[arg-type]  # what is no number raises TypeError


def commands() -> Iterator[int]:
    """The number of steps of each round asked for on stdin, until `quit` or the end of the stream."""
    for line in iter(sys.stdin.readline, ""):
        word, _, number = line.strip().partition(" ")
        if word == "quit":
            return
        if word != "run" or not number.isdigit():
            raise ValueError(f"the harness said {line!r}; expected 'run K' or 'quit'")
        yield int(number)


def say(answer: Answer) -> None:
    """Print an answer at once."""
    sys.stdout.write(encode_answer(answer))
    sys.stdout.flush()


def serve(run_round: Callable[[int], Sequence[float] | Times]) -> None:
    """The life of a driven process once it is set up: ready, then one round a command."""
    say(Ready())
    for num_steps in commands():
        times = run_round(num_steps)
        say(times if isinstance(times, Times) else Times(tuple(times)))


def timed(step: Callable[[], None]) -> float:
    """Seconds that one call takes."""
    start = time.perf_counter()
    step()
    return time.perf_counter() - start
