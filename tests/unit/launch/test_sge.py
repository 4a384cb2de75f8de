"""What the Grid Engine launcher gives to qsub."""

from __future__ import annotations

import pytest

from echelon.environment import Job
from echelon.errors import UsageError
from echelon.launch.hosts import Host
from echelon.launch.plan import Request
from echelon.launch.sge import SgeLauncher, job_script, qsub_command

SCRIPT = """#!/bin/sh
ECHELON_TASK=$((SGE_TASK_ID - 1))
export ECHELON_TASK
exec '/opt/my python/bin/python' -P -m echelon.launch.agents.task
"""


def test_the_script_of_a_task() -> None:
    assert job_script("/opt/my python/bin/python") == SCRIPT


def test_the_qsub_command() -> None:
    options = {"sge_queue": "gpu.q", "sge_args": ["-l h_rt=3600", "-ac 'note=two words'"]}
    assert qsub_command(options, 5, "echelon-1", "/home/anna/my logs", ["ECHELON_HUB", "PYTHONPATH"]) == [
        *("qsub", "-terse", "-sync", "y", "-N", "echelon-1", "-t", "1-5", "-cwd", "-S", "/bin/sh"),
        *("-r", "n", "-j", "y", "-o", "/home/anna/my logs", "-v", "ECHELON_HUB,PYTHONPATH"),
        *("-q", "gpu.q", "-l", "h_rt=3600", "-ac", "note=two words"),
    ]


def test_a_dry_run_shows_the_command_and_the_script() -> None:
    launcher = SgeLauncher()
    text = launcher.describe(launcher.plan(Request(Job(num_workers=2, num_servers=1), ["python", "train.py"])))
    assert text.startswith("qsub -terse -sync y -N '<job name>' -t 1-3 ")
    assert "ECHELON_CREDENTIALS_FILE" in text.splitlines()[0]
    assert "exec " in text
    assert "\nscheduler 0 on this machine: " in text
    assert "\nworker 1 on <a host of Grid Engine>: python train.py\n" in text


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (Request(Job(), ["true"], hosts=(Host("h1"),)), "omit -H"),
        (Request(Job(), ["true"], sync_dst_dir="/copy"), "--sync-dst-dir belongs to --launcher ssh"),
    ],
)
def test_what_grid_engine_cannot_do(request_: Request, error: str) -> None:
    with pytest.raises(UsageError, match=error):
        SgeLauncher().plan(request_)
