"""`echelon node`: two nodes of a job, each started by its own command, here on one machine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from echelon.launch.supervision import supervise
from echelon.launch.supervision.children import Command
from echelon.launch.supervision.supervise import Supervisor
from ports import free_port

PROGRAM = """
import sys, torch, echelon
if sys.argv[1:] == ["fail"]:
    raise SystemExit("failed on purpose")
store = echelon.kvstore.create("dist_async")
store.init("x", torch.zeros(3))
store.set_optimizer('sgd', lr=1.0)
for _ in range(1 if store.rank else 50):
    store.push("x", torch.ones(3))
out = torch.zeros(3)
store.pull("x", out)
print(f"rank {store.rank} is done", flush=True)
"""


@pytest.fixture
def port() -> int:
    """A free port."""
    return free_port()


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def start(program: Path, rank: int, port: int, *arguments: str) -> subprocess.Popen[str]:
    words = ["node", str(rank), "--num-nodes", "2", "--rendezvous", f"lo:127.0.0.1:{port}", "--"]
    command = [sys.executable, "-m", "echelon.cli.main", *words, sys.executable, str(program), *arguments]
    environment = os.environ | {"XDG_CONFIG_HOME": str(program.parent)}
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=program.parent
    )


def test_two_nodes_train_together(program: Path, port: int) -> None:
    with start(program, 1, port) as second, start(program, 0, port) as first:
        outputs = [process.communicate(timeout=90)[0] for process in (first, second)]
    assert [first.returncode, second.returncode] == [0, 0], outputs
    assert f"echelon: node 0 of 2 waits for the others at 127.0.0.1:{port}\n" in outputs[0]
    assert f"echelon: node 1 of 2 waits for node 0 at 127.0.0.1:{port}\n" in outputs[1]
    assert "[worker 0] rank 0 is done\n" in outputs[0]
    assert "[worker 1] rank 1 is done\n" in outputs[1]


def test_a_node_whose_worker_cannot_start_ends(program: Path, port: int) -> None:
    with start(program, 1, port, "fail") as node:
        output = node.communicate(timeout=60)[0]
    assert node.returncode == 1
    assert "[worker 1] failed on purpose" in output


def test_a_taken_port_gives_one_line(program: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        with start(program, 0, number) as node:
            output = node.communicate(timeout=60)[0]
    assert node.returncode == 2
    assert output.startswith(f"echelon: port {number} of 127.0.0.1 is taken: ")
    assert output.count("\n") == 1


@pytest.mark.parametrize("needed", [True, False])
def test_servers_continue_while_other_nodes_need_them(needed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "GRACE_S", 0.1)
    commands = [
        Command("server 0", [sys.executable, "-c", "import time; time.sleep(2)"], {}, essential=True),
        Command("worker 0", ["true"], {}, essential=False),
    ]
    status = Supervisor(needed_elsewhere=lambda: needed).run(commands)
    assert status == (0 if needed else 1)
