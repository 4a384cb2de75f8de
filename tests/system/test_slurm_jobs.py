"""Jobs under a real Slurm with two nodes: in an allocation, and as batch jobs that are submitted and followed."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from hosts import Host, Network, make_hosts
from slurm_cluster import Slurm, start_slurm

from echelon.testing.launcher import CHECKS, Check, LauncherTrial
from jobs import until

pytestmark = pytest.mark.system

TRAINING = [sys.executable, str(Path(__file__).with_name("training_worker.py"))]
WEIGHTS = re.compile(r"worker (\d) on (\S+) has weights (\w+)")
SUBMITTED = re.compile(r"submitted Slurm job (\d+); its output goes to (\S+)")
BATCH = ["--launcher", "slurm", "--slurm-nodes", "2"]
TIMEOUT_S = 100.0

# Counts steps. On SIGTERM it asks a server, saves and ends, as `echelon train` does; the next run continues.
COUNTING = """
import pathlib, signal, sys, time, torch, echelon
state, stop = pathlib.Path("count"), []
count = int(state.read_text()) if state.exists() else 0
signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
kv = echelon.kvstore.create("dist_async")
kv.init("weights", torch.ones(1))
print("begins at", count, flush=True)
while not pathlib.Path("enough").exists():
    if stop:
        kv.pull("weights", torch.zeros(1))
        if kv.rank == 0:
            state.write_text(str(count))
        print("saved", count, flush=True)
        sys.exit(143)
    count += 1
    time.sleep(0.02)
print("ends at", count, flush=True)
"""


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    with make_hosts(tmp_path_factory.mktemp("slurm"), 2, sshd=False) as network:
        yield network


@pytest.fixture(scope="module")
def cluster(network: Network, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with start_slurm(network, tmp_path_factory.mktemp("cluster")) as slurm:
        yield slurm


@pytest.fixture
def slurm(cluster: Slurm) -> Iterator[Slurm]:
    """The cluster, on which a test leaves no job."""
    try:
        yield cluster
        until(lambda: not cluster.jobs(), "no job is left")
    finally:
        cluster.cancel_all()


@pytest.fixture
def allocation(slurm: Slurm) -> Iterator[Mapping[str, str]]:
    """The variables of an allocation of both nodes, as `salloc` sets them."""
    slurm.run(["salloc", "--no-shell", "--nodes=2", "--ntasks=4", "--ntasks-per-node=2"])
    (job,) = slurm.jobs()
    nodes = {"SLURM_JOB_NODELIST": "h[1-2]", "SLURM_JOB_CPUS_PER_NODE": "2(x2)"}
    yield {**slurm.variables, "SLURM_JOB_ID": job, **nodes}
    slurm.run(["scancel", job])


def launch(*words: str, workers: int = 2, servers: int = 1) -> list[str]:
    return [sys.executable, "-m", "echelon", "launch", "-n", str(workers), "-s", str(servers), *words]


class Submitted:
    """A job that a launcher on `login` has submitted and follows."""

    def __init__(self, slurm: Slurm, folder: Path, *words: str) -> None:
        self._slurm = slurm
        self.launcher = slurm.login.start(launch(*words), environment=slurm.variables, cwd=folder)
        assert self.launcher.stderr is not None
        found = SUBMITTED.search(self.launcher.stderr.readline())
        assert found is not None
        self.id, self._file = found[1], Path(found[2])

    def wait_for(self, text: str, count: int = 1) -> None:
        """Wait until the output of the job has a text."""
        until(lambda: self.text().count(text) >= count, f"{text!r} in {self._file}", TIMEOUT_S)

    def text(self) -> str:
        return self._file.read_text() if self._file.exists() else ""

    def finish(self) -> tuple[int, str]:
        """Return the launcher's exit status and what it has printed."""
        out, err = self.launcher.communicate(timeout=TIMEOUT_S)
        return self.launcher.returncode, out + err


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_conformance_in_an_allocation(
    network: Network, allocation: Mapping[str, str], check: Check, tmp_path: Path
) -> None:
    environment = {**network.login.variables, **allocation}
    check(LauncherTrial(["--launcher", "slurm"], network.login.prefix(tmp_path), environment))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_conformance_of_batch_jobs(network: Network, slurm: Slurm, check: Check, tmp_path: Path) -> None:
    environment = {**network.login.variables, **slurm.variables}
    check(LauncherTrial(BATCH, network.login.prefix(tmp_path), environment))


def test_the_weights_are_those_of_one_machine_bit_for_bit(slurm: Slurm, tmp_path: Path) -> None:
    done = slurm.login.run(
        launch(*BATCH, "--", *TRAINING, servers=2), environment=slurm.variables, cwd=tmp_path, timeout_s=TIMEOUT_S
    )
    by_slurm = WEIGHTS.findall(done.stdout)
    local = WEIGHTS.findall(slurm.run(launch("--", *TRAINING, servers=2), timeout_s=TIMEOUT_S).stdout)
    assert sorted(by_slurm)[0][:2] == ("0", "10.77.0.1")
    assert sorted(by_slurm)[1][:2] == ("1", "10.77.0.2")
    assert len({digest for _, _, digest in [*by_slurm, *local]}) == 1, (by_slurm, local)
    assert len(local) == 2


def test_a_cancelled_job_saves_and_ends(slurm: Slurm, network: Network, tmp_path: Path) -> None:
    """scancel sends SIGTERM to all processes of the job at once. Servers and scheduler run until the workers end."""
    job = Submitted(slurm, tmp_path, *BATCH, "--slurm-requeue", "--", sys.executable, "-c", COUNTING)
    job.wait_for("begins at 0", count=2)
    slurm.run(["scancel", job.id])
    status, lines = job.finish()
    assert status == 143, lines
    assert "[worker 0] saved" in lines
    assert "[worker 1] saved" in lines
    assert f"Slurm job {job.id} was cancelled" in lines
    assert_nodes_are_empty(network)


def test_a_preempted_job_saves_is_queued_again_and_continues(slurm: Slurm, tmp_path: Path) -> None:
    job = Submitted(
        slurm,
        tmp_path,
        *BATCH,
        *("--slurm-partition", "low", "--slurm-args=--exclusive", "--slurm-requeue"),
        *("--", sys.executable, "-c", COUNTING),
    )
    job.wait_for("begins at 0", count=2)
    slurm.run(["srun", "--partition=high", "--nodes=2", "--exclusive", "true"], timeout_s=TIMEOUT_S)
    saved = (tmp_path / "count").read_text()
    job.wait_for(f"begins at {saved}", count=2)
    (tmp_path / "enough").touch()
    status, lines = job.finish()
    assert status == 0, lines
    assert f"Slurm job {job.id} is queued again" in lines
    assert int(saved) > 0


def test_a_detached_job_continues_alone(slurm: Slurm, tmp_path: Path) -> None:
    waiting = "until [ -e go ]; do sleep 0.1; done; echo went on"
    words = launch(*BATCH, "--slurm-detach", "--", "sh", "-c", waiting, servers=0)
    done = slurm.login.run(words, environment=slurm.variables, cwd=tmp_path)
    found = SUBMITTED.search(done.stderr)
    assert found is not None
    assert not done.stdout
    (tmp_path / "go").touch()
    until(lambda: Path(found[2]).exists() and "[worker 1] went on" in Path(found[2]).read_text(), "its end", TIMEOUT_S)


def test_a_job_that_waits_says_why_and_is_cancelled_by_ctrl_c(slurm: Slurm, tmp_path: Path) -> None:
    job = Submitted(slurm, tmp_path, *BATCH, "--slurm-args=--begin=now+1hour", "--", "true")
    assert job.launcher.stderr is not None
    assert job.launcher.stderr.readline() == f"echelon: Slurm job {job.id} waits: BeginTime\n"
    job.launcher.send_signal(signal.SIGINT)
    assert job.finish()[0] == 128 + signal.SIGINT


def test_an_impossible_request_is_an_error_at_once(slurm: Slurm, tmp_path: Path) -> None:
    words = launch("--launcher", "slurm", "--slurm-partition", "gpu", "--", "true")
    done = slurm.login.run(words, environment=slurm.variables, cwd=tmp_path, check=False)
    assert done.returncode != 0
    assert "sbatch" in done.stderr
    assert "invalid partition specified: gpu" in done.stderr


def test_a_folder_with_a_space_and_a_percent_sign(slurm: Slurm, tmp_path: Path) -> None:
    folder = tmp_path / "my runs 100%j #1"
    folder.mkdir()
    words = launch(*BATCH, "--env", "KEY=two words", "--", "sh", "-c", 'echo "$KEY in $PWD"', workers=1, servers=0)
    done = slurm.login.run(words, environment=slurm.variables, cwd=folder, timeout_s=TIMEOUT_S)
    assert done.stdout == f"[worker 0] two words in {folder}\n", done


def test_more_processes_than_cpus(slurm: Slurm, tmp_path: Path) -> None:
    """In an allocation with one CPU per node, tasks share the CPUs."""
    inner = " ".join(launch("--launcher", "slurm", "--", "hostname", workers=4, servers=0))
    words = ["sbatch", "--wait", "--nodes=2", "--ntasks-per-node=1", f"--output={tmp_path}/out", f"--wrap={inner}"]
    slurm.run(words, timeout_s=TIMEOUT_S)
    lines = sorted((tmp_path / "out").read_text().splitlines())[:4]
    assert lines == ["[worker 0] h1", "[worker 1] h2", "[worker 2] h1", "[worker 3] h2"]


def assert_nodes_are_empty(network: Network) -> None:
    """Only the daemons of Slurm run on the nodes."""

    def others(host: Host) -> list[str]:
        return [command for command in host.processes().values() if "slurmd" not in command]

    until(lambda: not any(map(others, network.hosts)), "nothing but slurmd runs on the nodes")
