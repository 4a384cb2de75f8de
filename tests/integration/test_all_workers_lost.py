"""All workers of a user's own loop are killed: those that are started again continue with the servers' values."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from echelon.errors import NOT_WHOLE

# The gradient of each weight is 1, so a weight says how many steps were made since it was 0.
PROGRAM = """
import os, signal, sys
import torch
import echelon
from torch import nn

class Network(nn.Module):
    def __init__(self, start):
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), start))
        self.table = nn.Embedding(4, 2, sparse=True)
        nn.init.constant_(self.table.weight, start)
        if sys.argv[1] == "frozen":
            self.frozen = nn.Parameter(torch.full((3,), start), requires_grad=False)

    def forward(self):
        return self.weight.sum() + self.table(torch.tensor([1])).sum()

restarts = int(os.environ["ECHELON_RESTARTS"])
model = Network(100.0 * restarts)
trainer = echelon.Trainer(model, torch.optim.SGD(model.parameters(), lr=1.0), "dist_sync")
for made, samples in enumerate(trainer.samples(10, batch_size=1, epochs=3)):
    if made == 14 and not restarts:
        os.kill(os.getpid(), signal.SIGKILL)
    model.zero_grad()
    model().backward()
    trainer.step(1)
trainer.close()
print("weights", model.weight.tolist(), model.table.weight[1].tolist(), flush=True)
"""


@pytest.mark.parametrize(
    ("untrained", "status"), [("none", 0), pytest.param("frozen", NOT_WHOLE, marks=pytest.mark.long)]
)
def test_the_only_worker_is_killed_and_continues_with_the_values_of_the_servers(
    tmp_path: Path, untrained: str, status: int
) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = f"-m echelon.cli.main launch -n 1 -s 2 {sys.executable} {program} {untrained}"
    done = subprocess.run(
        [sys.executable, *command.split()], capture_output=True, text=True, check=False, cwd=tmp_path, timeout=100
    )
    printed = done.stdout + done.stderr
    assert done.returncode == status, printed
    assert "weights [-30.0, -30.0, -30.0] [-30.0, -30.0]" in printed, "one update per sample of three epochs"
    if status:
        assert "no other worker was left to send its frozen parameters and buffers" in printed
