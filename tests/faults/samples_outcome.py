"""What the workers of `samples_worker.py` wrote down, and whether each sample was trained once per epoch."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from jobs import TESTS

PROGRAM = TESTS / "faults" / "samples_worker.py"


class Outcome:
    """What the workers of a job wrote down: how often each sample of each epoch was trained, and what is in doubt."""

    def __init__(self, folder: Path, partial: int) -> None:
        self.partial = partial
        self.ended: Counter[tuple[int, int]] = Counter()
        self.in_doubt: set[tuple[int, int]] = set()
        self.steps: dict[str, int] = {}
        for file in sorted(folder.iterdir()):
            lines = [line.split() for line in file.read_text().splitlines()]
            begun = [(int(epoch), *map(int, index)) for what, epoch, *index in lines if what == "begin"]
            ended = [(int(epoch), *map(int, index)) for what, epoch, *index in lines if what == "end"]
            self.steps[file.name] = len(ended)
            self.ended.update((epoch, one) for epoch, *index in ended for one in index)
            self.in_doubt |= {(epoch, one) for epoch, *index in begun[len(ended) :] for one in index}


def check(outcome: Outcome, num_samples: int, epochs: int) -> None:
    every = {(epoch, one) for epoch in range(epochs) for one in range(num_samples)}
    assert outcome.ended.keys() <= every
    assert not {one for one, count in outcome.ended.items() if count > 1}, "no sample twice"
    assert every - outcome.ended.keys() <= outcome.in_doubt, "no sample missing"
