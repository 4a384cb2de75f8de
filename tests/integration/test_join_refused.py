"""`echelon join` with workers that a real job refuses: one line says why, and nothing is started again."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from jobs import Job, until

PROGRAM = """
import os, sys, torch, echelon
from pathlib import Path
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
trainer = echelon.Trainer(model, optimizer, "dist_sync")
for indices in trainer.samples(100, batch_size=int(os.environ["BATCH"]), epochs=10_000_000):
    model(torch.rand(len(indices), 4)).mean().backward()
    trainer.step(len(indices))
    if trainer.clock == 1 and not trainer.kvstore.rank:
        print("trains", flush=True)
    if Path(sys.argv[1]).exists():
        trainer.kvstore.halt("the test has seen enough")
    if trainer.kvstore.halted:
        break
"""


class Joining:
    """The command that the launcher has printed, with another batch size and more flags; its output is in a file."""

    def __init__(self, folder: Path, command: str, batch: int, *flags: str) -> None:
        words = [sys.executable, "-m", *shlex.split(command)]
        words[5:5] = flags
        self._path = folder / "joining"
        with self._path.open("wb") as output:
            environment = {**os.environ, "BATCH": str(batch)}
            self.process = subprocess.Popen(
                words, stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=folder.parent
            )

    @property
    def lines(self) -> list[str]:
        return self._path.read_text().splitlines()


@pytest.mark.long
def test_workers_that_the_job_refuses_are_not_started_again_and_the_job_says_why(tmp_path: Path) -> None:
    program, stop = tmp_path / "loop.py", tmp_path / "stop"
    program.write_text(PROGRAM)
    command, options = [sys.executable, str(program), str(stop)], ["--max-workers", "3"]
    with Job(tmp_path, num_workers=2, command=command, options=options, environment={"BATCH": "10"}) as job:
        found = until(lambda: re.search(r"can join this job: (echelon join .*)", job.err), "the command to join")
        until(lambda: "trains" in job.out, "the first step")

        other = Joining(tmp_path, found[1], 20)
        assert other.process.wait(60) == 2, other.lines
        why = r"worker 2: the other workers have opened .* in batches of 10, .* but worker 2 opens .* in batches of 20,"
        first, last = other.lines
        assert re.match(rf"\[new worker 0\] error: {why}", first)
        assert last.endswith(") exited with status 2")
        until(lambda: re.search(rf"view .* failed: {why}", job.out), "the log of the job says why")

        more = Joining(tmp_path, found[1], 10, "-n", "2")
        until(lambda: any("--max-workers" in line for line in more.lines), "a worker is refused")
        stop.touch()
        assert job.wait() == 0, job.out
        assert more.process.wait(60) == 2
        refused, end = more.lines
        assert re.search(r"error: worker: the scheduler rejected this process: all 3 workers have already", refused)
        assert "exited with status 2" in end
