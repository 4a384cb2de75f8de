"""The contenders of `echelon bench io`: one process each, which reads the same record file in the same way."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from echelon.bench.harness.mxnet_environment import mxnet_command
from echelon.bench.harness.process import ProcessContender, ProcessSpec
from echelon.bench.harness.turns import Contender


@dataclass(frozen=True, slots=True, kw_only=True)
class IoPlan:
    """The work that every contender of a run does. `work_dir` holds logs during the run."""

    rec: str
    batch_size: int
    threads: int
    step_batches: int
    work_dir: Path


def echelon(plan: IoPlan) -> Contender:
    """Return Echelon's loader."""
    return _contender("echelon", plan, [sys.executable, "-m", "echelon.bench.io.worker_echelon"])


def mxnet(plan: IoPlan) -> Contender:
    """Return MXNet's ImageRecordIter."""
    return _contender("mxnet", plan, mxnet_command(Path(__file__).with_name("worker_mxnet.py")))


def _contender(name: str, plan: IoPlan, program: Sequence[str]) -> Contender:
    flags = ["--rec", plan.rec, "--batch-size", str(plan.batch_size), "--threads", str(plan.threads)]
    flags += ["--step-batches", str(plan.step_batches)]
    return ProcessContender(name, [ProcessSpec(name, [*program, *flags], driven=True)], plan.work_dir)


PEERS: dict[str, Callable[[IoPlan], Contender]] = {"mxnet": mxnet}
