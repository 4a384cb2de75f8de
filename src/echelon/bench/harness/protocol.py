"""The lines that the harness and a worker program exchange over the program's stdin and stdout.

    harness → program    run K      do K steps now, together with the other processes of the contender
                         quit       exit; the end of the stream means the same, so no program outlives a killed harness
    program → harness    {"ready": true}          once, when the program is ready for its first step
                         {"step_s": [0.1, …]}     after each `run K`: the seconds of each of the K steps; training adds
                                                  "losses": [2.3, …], one per step

Between two lines a program blocks on its stdin and uses no CPU. The harness keeps every other line that a program
prints for error messages. An answer may follow a prefix (such as a launcher's role and rank), so the harness looks for
it from the first brace on.

This module needs only the standard library of Python 3.10, because programs that run under MXNet's Python import it
too.
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
    """The program has started and waits for its first command."""


@dataclass(frozen=True, slots=True)
class Times:
    """The seconds of each step of one round and, if the steps train a network, the loss of each."""

    step_s: tuple[float, ...]
    losses: tuple[float, ...] = ()


Answer = Ready | Times


def run_command(num_steps: int) -> str:
    """Return the line that asks for a round."""
    return f"run {num_steps}\n"


def encode_answer(answer: Answer) -> str:
    """Return the answer as a line that `decode_answer` reads."""
    if isinstance(answer, Ready):
        return json.dumps({"ready": True}) + "\n"
    losses = {"losses": answer.losses} if answer.losses else {}
    return json.dumps({"step_s": answer.step_s, **losses}) + "\n"


def decode_answer(line: str) -> Answer | None:
    """Return the answer in a line of output, or None if the line holds no answer."""
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
    return tuple(float(value) for value in values)  # type: ignore[arg-type]  # a value of another type raises TypeError


def commands() -> Iterator[int]:
    """Yield the number of steps of each round requested on stdin, until `quit` or the end of the stream."""
    for line in iter(sys.stdin.readline, ""):
        word, _, number = line.strip().partition(" ")
        if word == "quit":
            return
        if word != "run" or not number.isdigit():
            raise ValueError(f"the harness sent {line!r}; expected 'run K' or 'quit'")
        yield int(number)


def send(answer: Answer) -> None:
    """Print an answer and flush it."""
    sys.stdout.write(encode_answer(answer))
    sys.stdout.flush()


def serve(run_round: Callable[[int], Sequence[float] | Times]) -> None:
    """Answer commands until `quit`. A worker program calls this when it is ready for its first step."""
    send(Ready())
    for num_steps in commands():
        times = run_round(num_steps)
        send(times if isinstance(times, Times) else Times(tuple(times)))


def timed(step: Callable[[], None]) -> float:
    """Call `step` and return the seconds it took."""
    start = time.perf_counter()
    step()
    return time.perf_counter() - start
