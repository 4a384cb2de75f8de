"""`echelon bench run`: real experiments, an interrupted sweep, and the two `./run` processes of seed 002."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from echelon.bench.dlbs.records import read_records

EXAMPLES = Path(__file__).parents[2] / "examples" / "image-classification"
BENCH = [sys.executable, "-m", "echelon.cli.main", "bench", "run"]
SMALL = ["-P", 'exp.model="mlp"', "-P", "exp.num_batches=6", "-P", "exp.replica_batch=4"]


def records(path: Path) -> dict[str, Any]:
    return read_records(path.read_text().splitlines())


@pytest.mark.long
def test_a_sweep_measures_all_workers_and_survives_a_failed_cell(tmp_path: Path) -> None:
    """Worker 1 needs at least 60 ms per step, so rank 0 alone would promise three times its rate."""
    words = [*SMALL, "-P", "echelon.num_workers=2", "-P", "echelon.num_servers=1", "-P", "monitor.frequency=0.05"]
    words += ["-P", "echelon.pace=0.02", "-P", 'echelon.slow="1:3"', "-P", 'mxnet.kv_store="dist_async"']
    words += ["-P", "exp.num_batches=12", "-V", 'runtime.launcher=["false",""]', "-P", 'exp.log_file="${exp.id}.log"']
    done = subprocess.run(
        [*BENCH, *words, "--json", "r.json"], cwd=tmp_path, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 1, done.stdout + done.stderr
    failed, row = json.loads((tmp_path / "r.json").read_text())["data"]
    assert (failed["exp.status"], row["exp.status"]) == ("failure", "ok"), done.stderr
    assert "exit" in failed["exp.status_msg"]
    assert failed["exp.status_msg"] in done.stdout
    assert row["results.worker_rank"] == [0, 1]
    assert [len(times) for times in row["results.worker_time_data"]] == [12, 12]
    assert row["results.worker_time"][1] >= 60
    assert row["results.throughput"] == pytest.approx(sum(row["results.worker_throughput"]), abs=0.01)
    assert row["results.worker_throughput"][1] <= 4 / 0.06
    assert row["results.use.mem_res"]
    assert len(row["results.worker_compute_s"]) == 2
    assert sum(row["results.staleness"].values()) == 2 * 13
    log = records(tmp_path / row["exp.log_file"])
    assert log == {key: row[key] for key in log}
    assert not list(tmp_path.rglob("*.safetensors"))


@pytest.mark.long
def test_an_interrupted_sweep_continues(tmp_path: Path) -> None:
    words = [*BENCH, *SMALL, "-P", 'mxnet.kv_store="local"', "-P", 'exp.log_file="${exp.replica_batch}.log"']
    words += ["-V", "exp.replica_batch=[2,4]"]
    with subprocess.Popen(words, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as sweep:
        assert sweep.stderr is not None
        line = sweep.stderr.readline()
        assert line.startswith("[1/2] exp.replica_batch=2: "), line
        sweep.send_signal(signal.SIGINT)
        sweep.stderr.read()
    assert sweep.returncode == 130
    first = (tmp_path / "2.log").read_bytes()
    assert records(tmp_path / "2.log")["exp.status"] == "ok"
    if (tmp_path / "4.log").exists():  # the second experiment has begun; it may not have written its parameters yet
        assert records(tmp_path / "4.log").get("exp.status", "running") == "running"
    again = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert again.returncode == 0, again.stdout + again.stderr
    assert (tmp_path / "2.log").read_bytes() == first
    assert records(tmp_path / "4.log")["exp.status"] == "ok"
    assert "it has a result already" in again.stderr


@pytest.mark.long
def test_the_two_nodes_of_seed_002(tmp_path: Path) -> None:
    """Both logs have the result of both workers, and a status of their own."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for name in ("run", "config.json"):
        shutil.copy(EXAMPLES / name, tmp_path)
    words = [*SMALL, "-P", f'mxnet.rendezvous="lo:127.0.0.1:{port}"']
    variables = {"XDG_CONFIG_HOME": str(tmp_path), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}

    def start(rank: int) -> subprocess.Popen[str]:
        command = [str(tmp_path / "run"), str(rank), *words]
        return subprocess.Popen(
            command, env=os.environ | variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    with start(0) as first, start(1) as second:
        outputs = [process.communicate(timeout=100)[0] for process in (first, second)]
    assert [first.returncode, second.returncode] == [0, 0], outputs
    logs = [records(tmp_path / "logs" / f"rank_{rank}.log") for rank in (0, 1)]
    for rank, log in enumerate(logs):
        assert (log["exp.status"], log["mxnet.rank"], log["results.worker_rank"]) == ("ok", rank, [0, 1])
        status = json.loads((tmp_path / "logs" / f"rank_{rank}.status.json").read_text())
        assert (status["status"], status["rank"]) == ("ok", rank)
    assert logs[0]["results.throughput"] == logs[1]["results.throughput"] > 0
    assert logs[0]["results.time_data"] == logs[1]["results.time_data"]
