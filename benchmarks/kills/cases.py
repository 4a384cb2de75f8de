"""The jobs: which processes each system runs, and which one is killed."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from echelon.bench.harness.mxnet_environment import MXNET_DEFAULTS, mxnet_command

NUM_WORKERS, NUM_SERVERS = 3, 2
NUM_STEPS, STEP_S = 600, 0.05
KILL_AT, SAVE_EVERY = 70, 50
_HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Command:
    """One process that the benchmark starts."""

    name: str
    arguments: Sequence[str]
    environment: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Case:
    """A job and the process that is killed in it: one that the benchmark started, or a child of one.

    `victim` is the name of a command, or "ROLE RANK" for a child of one. `run` is the folder of Echelon's events.
    """

    system: str
    killed: str
    victim: str
    commands: Sequence[Command]
    run: Path | None = None


def mxnet(victim: str, _folder: Path) -> Case:
    """A job of MXNet as its tools/launch.py starts it: a scheduler, servers and workers, each from the same command."""
    common = {
        **MXNET_DEFAULTS,
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": str(_free_port()),
        "DMLC_NUM_WORKER": str(NUM_WORKERS),
        "DMLC_NUM_SERVER": str(NUM_SERVERS),
    }
    program = [*mxnet_command(_HERE / "worker_mxnet.py"), str(NUM_STEPS), str(STEP_S)]
    names = ["scheduler 0", *(f"server {rank}" for rank in range(NUM_SERVERS))]
    names += [f"worker {rank}" for rank in range(NUM_WORKERS)]
    commands = [Command(name, program, {**common, "DMLC_ROLE": name.split()[0]}) for name in names]
    return Case("MXNet 1.9.1 dist_sync", victim.split()[0], victim, commands)


def ddp(victim: str, max_restarts: int, folder: Path) -> Case:
    """A job of DDP under torchrun: the agent, and the workers that it starts."""
    program = [str(_HERE / "worker_ddp.py"), str(NUM_STEPS), str(STEP_S), str(SAVE_EVERY), str(folder / "snapshot.pt")]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(NUM_WORKERS)]
    torchrun += ["--max-restarts", str(max_restarts), "--master-port", str(_free_port())]
    agent = Command("agent 0", [*torchrun, *program], {})
    return Case(f"DDP, torchrun --max-restarts {max_restarts}", victim.split()[0], victim, [agent])


def echelon(victim: str, replicas: int, folder: Path) -> Case:
    """A job of `echelon launch`."""
    program = [sys.executable, str(_HERE / "worker_echelon.py"), str(NUM_STEPS), str(STEP_S)]
    launch = [sys.executable, "-m", "echelon", "launch", "-n", str(NUM_WORKERS), "-s", str(NUM_SERVERS)]
    launch += ["--replicas", str(replicas), "--run-dir", str(folder / "run")]
    launcher = Command("launcher 0", [*launch, *program], {"PYTHONPATH": os.environ.get("PYTHONPATH", "")})
    return Case(f"Echelon dist_sync, --replicas {replicas}", victim.split()[0], victim, [launcher], folder / "run")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    return port
