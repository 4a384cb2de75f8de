"""The conformance suite of launchers: what a user may rely on, wherever the processes of a job run.

`check_launcher(["--launcher", "ssh", "-H", "hosts"])` starts real jobs with `echelon launch` and these words. A
launcher of your own takes part as `--launcher package.module:NAME`. Processes of a job are recognised by a variable in
their environment, so all hosts of the job must be visible in /proc of this machine, as hosts in network namespaces are.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from echelon.environment import child_environment
from echelon.errors import NOT_WHOLE
from echelon.testing.assertions import assert_equal

TIMEOUT_S = 120.0  # timeout of what must happen; only a broken launcher reaches it
_MARK = "ECHELON_CHECK"


@dataclass(frozen=True)
class LauncherTrial:
    """A launcher under test.

    words        the words of `echelon launch` that select it
    prefix       a command to run `echelon launch` under, such as `ip netns exec NAME`
    environment  variables of the launcher
    python       runs the workers' programs, on the hosts
    restarts     it restarts a process that was killed
    """

    words: Sequence[str]
    prefix: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    python: str = sys.executable
    restarts: bool = True

    @contextmanager
    def job(self, program: str, *arguments: str, n: int = 2, s: int = 1) -> Iterator[RunningJob]:
        """Start a job whose workers run a Python program. At the end nothing of it may be left."""
        mark = secrets.token_hex(8)
        command = [
            *self.prefix,
            *(sys.executable, "-m", "echelon", "launch", "-n", str(n), "-s", str(s)),
            *self.words,
            *("--env", f"{_MARK}={mark}", "--", self.python, "-u", "-c", program, *arguments),
        ]
        environment = child_environment({**self.environment, "PYTHONUNBUFFERED": "1"})
        launcher = subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        job = RunningJob(launcher, mark)
        try:
            yield job
            job.wait_until_gone()
        finally:
            job.kill()

    def run(self, program: str, *arguments: str, n: int = 2, s: int = 1) -> tuple[int, list[str]]:
        """Run a job to its end. Return its exit status and its lines."""
        with self.job(program, *arguments, n=n, s=s) as job:
            return job.finish()


class RunningJob:
    """A job under test: its launcher, and its processes wherever they run."""

    def __init__(self, launcher: subprocess.Popen[str], mark: str) -> None:
        self._launcher = launcher
        self._mark = f"{_MARK}={mark}".encode()
        self.lines: list[str] = []

    def wait_for(self, text: str, count: int = 1) -> None:
        """Read lines until `count` of them contain a text."""
        assert self._launcher.stdout is not None
        while sum(text in line for line in self.lines) < count:
            line = self._launcher.stdout.readline()
            assert line, f"the job ended without {count} lines that contain {text!r}: {self.lines}"
            self.lines.append(line.rstrip("\n"))

    def send_signal(self, number: int) -> None:
        """Send a signal to the launcher alone."""
        self._launcher.send_signal(number)

    def finish(self) -> tuple[int, list[str]]:
        """Wait for the launcher's end. Return its exit status and all lines."""
        rest, _ = self._launcher.communicate(timeout=TIMEOUT_S)
        self.lines += rest.splitlines()
        return self._launcher.returncode, self.lines

    def processes(self) -> list[int]:
        """Return the numbers of the processes of the job that run, on any host."""
        return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal() and self._is_ours(path)]

    def pid_of(self, role: str) -> int:
        """Return the number of the server or of the scheduler of the job."""
        for number in self.processes():
            with suppress(OSError):
                if f"echelon.{role}".encode() in Path(f"/proc/{number}/cmdline").read_bytes():
                    return number
        raise AssertionError(f"the job has no {role}: {self.lines}")

    def wait_until_gone(self) -> None:
        """Wait until no process of the job is left."""
        deadline = time.monotonic() + TIMEOUT_S
        while left := self.processes():
            assert time.monotonic() < deadline, f"processes of the job are left: {left}; its lines: {self.lines}"
            time.sleep(0.05)

    def kill(self) -> None:
        """Kill what is left after a failed check."""
        self._launcher.kill()
        self._launcher.communicate()
        for number in self.processes():
            os.kill(number, signal.SIGKILL)

    def _is_ours(self, path: Path) -> bool:
        try:
            return self._mark in (path / "environ").read_bytes().split(b"\0")
        except OSError:  # it has just ended, or belongs to somebody else
            return False


Check = Callable[[LauncherTrial], None]


def check_launcher(
    words: Sequence[str],
    *,
    prefix: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    python: str = sys.executable,
    restarts: bool = True,
) -> None:
    """Run every check on the launcher that `words` select. See `LauncherTrial` for the parameters."""
    trial = LauncherTrial(words, prefix, environment or {}, python, restarts)
    for check in CHECKS:
        check(trial)


_SUM = """
import os, sys, torch, echelon
kv = echelon.kvstore.create("dist_sync")
size = kv.num_workers
kv.init("sum", torch.zeros(2))
kv.push("sum", torch.full((2,), 1.0 + kv.rank))
out = torch.zeros(2)
kv.pull("sum", out)
print("rank", kv.rank, "of", size, "has", out.tolist())
"""


def workers_train_together(trial: LauncherTrial) -> None:
    """Servers sum the pushes of all workers, and each line is labelled with role and rank."""
    status, lines = trial.run(_SUM)
    expected = [f"[worker {rank}] rank {rank} of 2 has [3.0, 3.0]" for rank in range(2)]
    assert_equal("the exit status", (status, lines), (0, lines))
    assert_equal("the workers' lines", sorted(line for line in lines if line.startswith("[worker")), expected)


def workers_train_without_servers(trial: LauncherTrial) -> None:
    """With -s 0, the workers find each other at worker 0."""
    status, lines = trial.run(_SUM, s=0)
    expected = [f"[worker {rank}] rank {rank} of 2 has [3.0, 3.0]" for rank in range(2)]
    assert_equal("the exit status", (status, lines), (0, lines))
    assert_equal("the workers' lines", sorted(line for line in lines if line.startswith("[worker")), expected)


def arguments_arrive_unchanged(trial: LauncherTrial) -> None:
    """Arguments may contain spaces, quotes, line breaks and whatever else a shell would change."""
    arguments = ["a b", "", "'", '"', "$HOME", "`id`", "*", "\\", "line\nbreak", "é", "--launcher", "-n", "9"]
    status, lines = trial.run("import sys; print(ascii(sys.argv[1:]))", *arguments, n=1, s=0)
    assert_equal("the exit status", (status, lines), (0, lines))
    assert_equal("the worker's line", [line for line in lines if "[worker 0]" in line], [f"[worker 0] {arguments!a}"])


def a_failed_worker_ends_a_job_without_servers(trial: LauncherTrial) -> None:
    """The others cannot continue and are stopped. The exit status is the worker's, and the error names it."""
    program = "import os, sys, time\nif os.environ['ECHELON_RANK'] == '1': sys.exit(7)\ntime.sleep(600)"
    status, lines = trial.run(program, s=0)
    assert_equal("the exit status", (status, lines), (7, lines))
    assert any("worker 1" in line and "exited with status 7" in line for line in lines), lines


_ONE_FAILS = """
import os, sys, torch, echelon
kv = echelon.kvstore.create("dist_sync")
kv.init("sum", torch.zeros(2))
if kv.rank == 1:
    os._exit(7)
for _ in range(3):
    kv.push("sum", torch.ones(2))
    out = torch.zeros(2)
    kv.pull("sum", out)
print("rank 0 went on")
"""


def a_job_with_servers_survives_a_worker(trial: LauncherTrial) -> None:
    """The others go on. The exit status says that nobody has trained the rest of its samples."""
    status, lines = trial.run(_ONE_FAILS)
    assert_equal("the exit status", (status, lines), (NOT_WHOLE, lines))
    assert "[worker 0] rank 0 went on" in lines, lines


_SURVIVES = """
import os, sys, time, torch, echelon
kv = echelon.kvstore.create("dist_sync")
kv.init("sum", torch.zeros(2))
for phase in range(3):
    for _ in range(3):
        kv.push("sum", torch.full((2,), 1.0 + kv.rank))
        out = torch.zeros(2)
        kv.pull("sum", out)
    print("phase", phase, "has", out.tolist(), flush=True)
    while not os.path.exists(os.path.join(sys.argv[1], str(phase))):
        time.sleep(0.05)
"""


def a_killed_server_and_a_killed_scheduler_are_restarted(trial: LauncherTrial) -> None:
    """The workers do not notice it: the result is the same, and the exit status is 0."""
    if not trial.restarts:
        return
    with TemporaryDirectory() as folder, trial.job(_SURVIVES, folder) as job:
        for phase, role in enumerate(["server", "scheduler"]):
            job.wait_for(f"phase {phase} has [3.0, 3.0]", count=2)
            os.kill(job.pid_of(role), signal.SIGKILL)
            job.wait_for(f"echelon: {role} 0 (")
            job.wait_for(f"] view {2 + 2 * phase}: ")  # its members have returned, or the server is lost
            Path(folder, str(phase)).touch()
        job.wait_for("phase 2 has [3.0, 3.0]", count=2)
        Path(folder, "2").touch()
        status, lines = job.finish()
    assert_equal("the exit status", (status, lines), (0, lines))
    # A program that the launcher started, such as qsub, may print the last line.
    assert any(line.startswith("echelon: the result is whole, although server 0 (") for line in lines), lines


_WAITS = """
import signal, sys
def stop(number, frame):
    print("stopped by", signal.Signals(number).name)
    sys.exit(128 + number)
signal.signal(signal.SIGINT, stop)
signal.signal(signal.SIGTERM, stop)
print("waits")
while True:
    signal.pause()
"""


def ctrl_c_reaches_every_worker(trial: LauncherTrial) -> None:
    """The workers get the signal, and time to save. Then the whole job ends, with status 130."""
    with trial.job(_WAITS) as job:
        job.wait_for("waits", count=2)
        job.send_signal(signal.SIGINT)
        status, lines = job.finish()
    assert_equal("the exit status", (status, lines), (130, lines))
    assert_equal(
        "stopped workers",
        sorted(line for line in lines if line.endswith("] stopped by SIGINT")),
        [f"[worker {rank}] stopped by SIGINT" for rank in range(2)],
    )


def nothing_outlives_a_killed_launcher(trial: LauncherTrial) -> None:
    """When the launcher is killed, every process of the job ends, on every host."""
    with trial.job(_WAITS) as job:
        job.wait_for("waits", count=2)
        assert len(job.processes()) >= 4, "two workers, a server and a scheduler"
        job.send_signal(signal.SIGKILL)


_LOOKS_FOR_SECRETS = """
import os, pathlib
secret = os.environ["ECHELON_CREDENTIALS"].split(".")[0].encode()
for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
    try:
        if secret in path.read_bytes():
            print("the secret is on the command line of", path.parent.name)
    except OSError:
        pass
print("looked")
"""


def no_command_line_shows_the_secret(trial: LauncherTrial) -> None:
    """Any user of a machine can read the command lines of all processes."""
    status, lines = trial.run(_LOOKS_FOR_SECRETS, n=1, s=0)
    assert_equal("the exit status", (status, lines), (0, lines))
    assert_equal("the worker's lines", [line for line in lines if line.startswith("[worker 0]")], ["[worker 0] looked"])


CHECKS: tuple[Check, ...] = (
    workers_train_together,
    workers_train_without_servers,
    arguments_arrive_unchanged,
    a_failed_worker_ends_a_job_without_servers,
    a_job_with_servers_survives_a_worker,
    a_killed_server_and_a_killed_scheduler_are_restarted,
    ctrl_c_reaches_every_worker,
    nothing_outlives_a_killed_launcher,
    no_command_line_shows_the_secret,
)
