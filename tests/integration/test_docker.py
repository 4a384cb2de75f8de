"""The files for containers. No engine runs here: the compose file's commands run as processes, with its environment."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from echelon.environment import Job
from echelon.transport.admission.credentials import Credentials, write_credentials
from ports import free_port

ROOT = Path(__file__).parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
PROGRAM = """
import torch, echelon
store = echelon.kvstore.create("dist_sync")
store.init("x", torch.zeros(3))
out = torch.zeros(3)
store.pushpull("x", torch.full((3,), store.rank + 1.0), out)
print("has", out[0].item())
"""


def test_every_service_is_a_process_of_one_job() -> None:
    jobs = {name: Job.from_environment(service["environment"]) for name, service in SERVICES.items()}
    assert {name: (job.role, job.rank) for name, job in jobs.items()} == {
        "scheduler": ("scheduler", None),
        **{f"{role}-{rank}": (role, rank) for role in ("server", "worker") for rank in (0, 1)},
    }
    assert {(job.num_workers, job.num_servers, job.scheduler_host) for job in jobs.values()} == {(2, 2, "scheduler")}


def test_the_secret_is_not_in_the_environment() -> None:
    assert COMPOSE["secrets"] == {"credentials": {"environment": "ECHELON_CREDENTIALS"}}
    for service in SERVICES.values():
        assert "ECHELON_CREDENTIALS" not in service["environment"]
        assert service["environment"]["ECHELON_CREDENTIALS_FILE"] == "/run/secrets/credentials"
        assert service["secrets"] == [{"source": "credentials", "uid": "1000", "mode": 0o400}]


def test_the_image_gets_files_that_exist() -> None:
    lines = (ROOT / "docker" / "Dockerfile").read_text().splitlines()
    copied = [word for line in lines if line.startswith("COPY") for word in line.split()[1:-1]]
    sent = (ROOT / "docker" / "Dockerfile.dockerignore").read_text().splitlines()
    assert copied
    for name in copied:
        assert (ROOT / name).exists()
        assert f"!{name}" in sent
    assert "USER 1000" in lines


def test_the_commands_train(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    write_credentials(tmp_path / "credentials", Credentials.create())
    port = str(free_port())
    here = {
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": port,
        "ECHELON_CREDENTIALS_FILE": str(tmp_path / "credentials"),
    }
    processes = {}
    for name, service in SERVICES.items():
        is_worker = name.startswith("worker")
        words = ["python", "program.py"] if is_worker else shlex.split(service["command"])
        assert words[0] == "python"
        processes[name] = subprocess.Popen(
            [sys.executable, *words[1:]],
            env={**os.environ, **service["environment"], **here},
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    try:
        outputs = {name: process.communicate(timeout=60)[0] for name, process in processes.items()}
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
    assert {name: process.returncode for name, process in processes.items()} == dict.fromkeys(SERVICES, 0), outputs
    assert outputs["worker-0"] == outputs["worker-1"] == "has 3.0\n"


@pytest.mark.parametrize("name", ["worker-0", "worker-1"])
def test_workers_run_a_script_of_the_image(name: str) -> None:
    default = SERVICES[name]["command"].removeprefix("${COMMAND:-").removesuffix("}")
    words = shlex.split(default)
    assert words[0] == "python"
    assert (ROOT / "examples" / "image-classification" / words[1]).is_file()
