"""The Ray launcher on a real cluster of two nodes: the suite of all launchers, the weights, a node that is killed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray_nodes import RayCluster

from echelon.errors import NOT_WHOLE
from echelon.testing.launcher import CHECKS, Check, LauncherTrial, nothing_outlives_a_killed_launcher
from leaks import MARK

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    """Two nodes. All tests of this module share them."""
    with RayCluster(MARK) as running:
        yield running


def trial(cluster: RayCluster, *words: str) -> LauncherTrial:
    return LauncherTrial(["--launcher", "ray", "--ray-address", cluster.address, *words], python="python")


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_launcher(cluster: RayCluster, check: Check) -> None:
    check(trial(cluster))


TRAINS = """
import hashlib, os, torch, echelon
from torch import nn
torch.manual_seed(5)
model = nn.Sequential(nn.Linear(20, 50), nn.Tanh(), nn.Linear(50, 5))
trainer = echelon.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), "dist_sync")
data = torch.Generator().manual_seed(int(os.environ["ECHELON_RANK"]))
for _ in range(20):
    trainer.zero_grad()
    images, labels = torch.randn(8, 20, generator=data), torch.randint(5, (8,), generator=data)
    nn.functional.cross_entropy(model(images), labels).backward()
    trainer.step(8)
weights = b"".join(value.detach().numpy().tobytes() for value in model.parameters())
print("node", os.environ.get("RAY_RAYLET_PID"))
print("weights", hashlib.sha256(weights).hexdigest())
"""


def after(word: str, lines: list[str]) -> list[str]:
    return [line.partition(f"{word} ")[2] for line in lines if line.startswith("[worker") and f"{word} " in line]


def test_workers_on_two_nodes_reach_the_weights_of_the_local_launcher_bit_for_bit(cluster: RayCluster) -> None:
    local = LauncherTrial(["--launcher", "local"], environment={"OMP_NUM_THREADS": "1"}).run(TRAINS, s=2)
    spread = trial(cluster, "--ray-strategy", "STRICT_SPREAD").run(TRAINS, s=2)
    assert (local[0], spread[0]) == (0, 0), (local, spread)
    assert len(set(after("node", spread[1]))) == 2, "each worker has a node of its own"
    assert len({*after("weights", local[1]), *after("weights", spread[1])}) == 1


# The head has room for the bundle of the scheduler, server 0 and worker 1; worker 0 is on the second node.
ON_BOTH = ("--ray-strategy", "STRICT_SPREAD", "--ray-server-cpus", "2")
SURVIVES = """
import time, torch, echelon
kv = echelon.kvstore.create("dist_sync")
kv.init("sum", torch.zeros(2))
out = torch.zeros(2)
for clock in range(4):
    if clock == 2:
        print("half-way", flush=True)
        while len(kv.workers) == 2:
            time.sleep(0.01)
    kv.push("sum", torch.ones(2))
    kv.pull("sum", out)
    print("step", clock, "sum", out.tolist(), flush=True)
"""


def test_a_job_goes_on_when_the_node_of_a_worker_is_killed(cluster: RayCluster) -> None:
    with trial(cluster, *ON_BOTH).job(SURVIVES) as job:
        job.wait_for("half-way", count=2)
        cluster.kill_second_node()
        status, lines = job.finish()
    cluster.add_second_node()
    assert status == NOT_WHOLE, lines
    assert after("step", lines)[-2:] == ["2 sum [1.0, 1.0]", "3 sum [1.0, 1.0]"], "worker 1 alone"
    error = r"worker 0 \(pid \d+ on [0-9.]+\) was lost: Ray lost its actor: .*node"
    assert any(line.startswith("echelon: the result is not whole") and re.search(error, line) for line in lines), lines


RESUMES = """
import os, pathlib, sys, torch, echelon
kv = echelon.kvstore.create("dist_sync")
kv.init("sum", torch.zeros(2000))
print("joined", flush=True)
checkpoint = pathlib.Path(sys.argv[1])
if not checkpoint.exists():
    checkpoint.write_text("5")
    print("saved", flush=True)
    while True:
        kv.push("sum", torch.ones(2000))
        kv.pull("sum", torch.zeros(2000))
print("resumed from", checkpoint.read_text(), flush=True)
"""


def test_a_job_that_lost_a_server_starts_again(cluster: RayCluster, tmp_path: Path) -> None:
    words = ("--ray-max-restarts", "1", "--ray-worker-cpus", "2")  # server 1 is on the second node
    with trial(cluster, *words).job(RESUMES, str(tmp_path / "checkpoint"), n=1, s=2) as job:
        job.wait_for("saved")
        cluster.kill_second_node()
        cluster.add_second_node()
        status, lines = job.finish()
    assert status == 0, lines
    assert after("resumed", lines) == ["from 5"]
    assert "echelon: Ray lost server 1: the whole job starts again (restart 1 of 1)" in lines


def test_without_restarts_the_loss_of_a_server_ends_the_job(cluster: RayCluster, tmp_path: Path) -> None:
    words = ("--ray-worker-cpus", "2")
    with trial(cluster, *words).job(RESUMES, str(tmp_path / "checkpoint"), n=1, s=2) as job:
        job.wait_for("saved")
        cluster.kill_second_node()
        status, lines = job.finish()
    cluster.add_second_node()
    assert status != 0, lines
    assert any("server 1" in line and re.search("died|Ray lost its actor", line) for line in lines), lines


def test_a_job_that_does_not_fit_says_what_it_needs_and_what_there_is(cluster: RayCluster) -> None:
    words = ("--ray-worker-cpus", "64", "--ray-timeout-s", "1")
    status, lines = trial(cluster, *words).run("print('never')", n=1, s=0)
    assert status == 127, lines
    wanted = "echelon: worker 0 (on Ray) cannot start: Ray did not reserve 1 bundles (64 CPU; SPREAD) within 1 s: "
    there = r"the cluster has \d nodes, and [\d.]+ of \d CPU and 0 of 0 GPU free"  # a killed node counts for a while
    assert re.fullmatch(re.escape(wanted) + there, lines[-1]), lines


def test_a_cluster_that_does_not_answer(cluster: RayCluster) -> None:
    status, lines = LauncherTrial(["--launcher", "ray", "--ray-address", "127.0.0.1:1"]).run("print('never')", n=1, s=0)
    assert status == 127, lines
    assert lines[-1].startswith(
        "echelon: worker 0 (on Ray) cannot start: the Ray cluster at 127.0.0.1:1 cannot be used: "
    )


def test_the_actors_log_has_the_lines_of_its_process(cluster: RayCluster) -> None:
    status, lines = trial(cluster).run("import sys; print('logged', sys.argv[1])", "for-the-dashboard", n=1, s=0)
    assert (status, lines) == (0, [*lines[:-1], "[worker 0] logged for-the-dashboard"])
    logs = [path.read_text(errors="replace") for path in Path(cluster.logs).glob("worker-*.out")]
    own = [text for text in logs if "logged for-the-dashboard\n" in text]
    assert len(own) == 1
    assert "worker 0 exited with status 0\n" in own[0]


def test_a_local_cluster_ends_with_a_killed_launcher() -> None:
    """The fixture that finds leaked processes checks it: agents of Ray's node stayed for a minute."""
    nothing_outlives_a_killed_launcher(LauncherTrial(["--launcher", "ray", "--ray-address", "local"], python="python"))


def test_a_local_cluster_is_started_for_the_job() -> None:
    local = LauncherTrial(["--launcher", "ray", "--ray-address", "local"], python="python")
    program = "import os; print('runs in', os.getcwd(), 'with', os.environ['OMP_NUM_THREADS'])"
    status, lines = local.run(program, n=3, s=0)
    assert status == 0, lines
    assert after("runs", lines) == [f"in {Path.cwd()} with 1"] * 3
