"""MXNet's launch scripts start jobs: their flags, their defaults, and flags of the command that look like theirs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
SHOW = "import os, sys; print(sys.argv[1:], os.environ.get('MINE'))"


def run(
    script: str, *arguments: str, python: str = sys.executable, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    command = [python, str(REPOSITORY / script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, cwd=cwd)


def hosts(tmp_path: Path) -> str:
    (tmp_path / "hosts").write_text("10.0.0.1\n10.0.0.2\n")
    return str(tmp_path / "hosts")


def test_the_command_keeps_flags_that_the_script_has_too() -> None:
    words = ["-n", "9", "-s", "3", "--log-file", "x", "--launcher", "ssh", "--env-server", "A:1", "--p3", "two words"]
    done = run("tools/launch.py", "-n", "1", "-s", "0", "--launcher", "local", sys.executable, "-c", SHOW, *words)
    assert done.returncode == 0, done
    assert done.stdout == f"[worker 0] {words} None\n"


def test_flags_of_mxnet_are_accepted() -> None:
    names = ["--nworker", "1", "--server-nodes", "0", "--env-worker", "MINE:a:b", "--log-level", "DEBUG", "--p3"]
    done = run("tracker/dmlc_local.py", *names, sys.executable, "-c", SHOW)
    assert done.returncode == 0, done
    assert done.stdout == "[worker 0] [] a:b\n"
    assert done.stderr.splitlines() == [
        "echelon: --log-level has no effect: all lines of all processes are shown",
        "echelon: --p3 has no effect: gradients are always sent in small buckets during the backward pass, the last "
        "layers' first",
    ]


def test_a_flag_that_no_script_has_is_an_error() -> None:
    done = run("tools/launch.py", "-n", "1", "--sync-dri", "/tmp/x", "python", "train.py")
    assert done.returncode == 2
    assert "--sync-dri" in done.stderr
    assert "did you mean --sync-dir" in done.stderr


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("tools/launch.py", "ssh -T"),
        ("tracker/dmlc_ssh.py", "rsync -az"),
        ("tracker/dmlc_yarn.py", "-container_memory 1000 -container_vcores 3 -queue q"),
        ("tracker/dmlc_local.py", "worker 0 on this machine: python train.py -s 3"),
    ],
)
def test_every_script_has_its_launcher(tmp_path: Path, script: str, expected: str) -> None:
    own = {"ssh": ["--sync-dir", "/tmp/there"], "yarn": ["-q", "q", "-mem", "1000", "--vcores", "3"]}
    more = next((words for name, words in own.items() if name in script), [])
    done = run(script, "-n", "2", "-s", "2", "-H", hosts(tmp_path), *more, "--dry-run", "python", "train.py", "-s", "3")
    assert done.returncode == 0, done
    assert expected in done.stdout


def test_a_copy_of_echelon_in_the_working_directory_is_used(tmp_path: Path) -> None:
    """As in MXNet's document: `cp -r ../../python/mxnet working_dir`. Workers import this copy, so agents do, too."""
    words = ("-n", "2", "-s", "2", "-H", hosts(tmp_path), "--dry-run", "python", "dist_sync_mlp.py")
    (tmp_path / "echelon").symlink_to(REPOSITORY / "src" / "echelon")
    done = run("tracker/dmlc_ssh.py", *words, cwd=tmp_path)
    assert done.returncode == 0, done
    assert f'PYTHONPATH="${{PYTHONPATH:+$PYTHONPATH:}}"{tmp_path};' in done.stdout


def test_launch_without_hosts_is_local() -> None:
    done = run("tools/launch.py", "-n", "1", "--dry-run", sys.executable, "train.py")
    assert "worker 0 on this machine" in done.stdout, done


@pytest.mark.parametrize(
    "script", ["tools/launch.py", *(f"tracker/dmlc_{name}.py" for name in ("local", "mpi", "yarn"))]
)
def test_without_echelon_the_script_says_how_to_run_it(script: str) -> None:
    assert os.access(REPOSITORY / script, os.X_OK)
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(REPOSITORY / script), "-n", "1"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "No module named 'echelon'; activate the environment that has Echelon" in done.stderr
