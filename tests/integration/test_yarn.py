"""The YARN launcher: its application, and a job whose containers a stand-in for `yarn` starts on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from echelon.environment import Job
from echelon.errors import UsageError
from echelon.launch.plan import Request
from echelon.launch.yarn import YarnLauncher, find_jar

GOLDEN = (
    "yarn: yarn jar shell.jar org.apache.hadoop.yarn.applications.distributedshell.Client -jar shell.jar "
    "-appname echelon -num_containers 3 -container_memory 2048 -container_vcores 2 -queue lab "
    "-shell_env ECHELON_CREDENTIALS_FILE=/etc/echelon/credentials "
    "-shell_env 'ECHELON_HUB=<address of this machine>:<free port>' -shell_env ECHELON_SECURITY=auto "
    "-shell_command '/opt/python -P -m echelon.launch.agents.task'"
)
YARN = """#!{python}
import os, shlex, subprocess, sys
words = sys.argv[1:]
value = lambda flag: words[words.index(flag) + 1]
environment = dict(os.environ)
environment.update(words[i + 1].split("=", 1) for i, word in enumerate(words) if word == "-shell_env")
command = shlex.split(value("-shell_command"))
containers = [subprocess.Popen(command, env=environment) for _ in range(int(value("-num_containers")))]
print("Application submitted", flush=True)
sys.exit(max(container.wait() for container in containers))
"""
PROGRAM = """
import torch, echelon
store = echelon.kvstore.create("dist_sync")
store.init("x", torch.zeros(3))
out = torch.zeros(3)
store.pushpull("x", torch.full((3,), store.rank + 1.0), out)
print("has", out[0].item())
"""


def test_the_application() -> None:
    options = {
        "yarn_jar": "shell.jar",
        "yarn_queue": "lab",
        "yarn_memory": 2048,
        "yarn_vcores": 2,
        "yarn_python": "/opt/python",
        "yarn_credentials_file": "/etc/echelon/credentials",
    }
    launcher = YarnLauncher()
    plan = launcher.plan(Request(Job(num_workers=2, num_servers=1), ["python", "train.py"], options=options))
    assert launcher.describe(plan).splitlines()[0] == GOLDEN


def launch(folder: Path, path: str, *program: str) -> subprocess.CompletedProcess[str]:
    words = ["launch", "-n", "2", "-s", "1", "-i", "lo", "--launcher", "yarn", "--yarn-python", sys.executable]
    return subprocess.run(
        [sys.executable, "-m", "echelon", *words, "--yarn-jar", str(folder / "shell.jar"), "--", *program],
        cwd=folder,
        env=os.environ | {"PATH": path, "XDG_CONFIG_HOME": str(folder)},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )


def test_a_job_runs_in_containers(tmp_path: Path) -> None:
    (tmp_path / "shell.jar").touch()
    (tmp_path / "program.py").write_text(PROGRAM)
    yarn = tmp_path / "yarn"
    yarn.write_text(YARN.format(python=sys.executable))
    yarn.chmod(0o755)
    done = launch(tmp_path, f"{tmp_path}:{os.environ['PATH']}", sys.executable, "program.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert {"[worker 0] has 3.0", "[worker 1] has 3.0", "[yarn] Application submitted"} <= set(done.stdout.splitlines())


def test_a_missing_yarn_gives_one_line(tmp_path: Path) -> None:
    (tmp_path / "shell.jar").touch()
    done = launch(tmp_path, "/nowhere", "true")
    assert done.returncode == 2
    assert done.stderr.startswith("echelon: --launcher yarn needs the program yarn, which is not in PATH")
    assert done.stderr.count("\n") == 1


def test_the_jar_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "share" / "hadoop" / "yarn"
    folder.mkdir(parents=True)
    with pytest.raises(UsageError, match="give the distributed shell's jar with --yarn-jar"):
        find_jar(None, str(tmp_path))
    jar = folder / "hadoop-yarn-applications-distributedshell-3.3.6.jar"
    jar.touch()
    assert find_jar(None, str(tmp_path)) == str(jar)
    with pytest.raises(UsageError, match="set HADOOP_HOME"):
        find_jar(None, None)
