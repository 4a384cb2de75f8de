"""Restarts of processes that failed, on real processes: of the supervisor alone, of the local launcher, and of agents.

The jobs have a scheduler and workers of a few lines, which write the notes that make a launcher restart processes.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from agents import PipeLauncher

from echelon.environment import Job
from echelon.launch.agents.messages import Hello, Started, encode
from echelon.launch.agents.remote import RemoteProcess
from echelon.launch.agents.streams import PipeStream
from echelon.launch.interface import Launcher, Output
from echelon.launch.local.launcher import LocalLauncher
from echelon.launch.plan import Request
from echelon.launch.supervision.children import Command, start_child
from echelon.launch.supervision.processes import RunningProcess
from echelon.launch.supervision.restarts import Restart, Restarts
from echelon.launch.supervision.supervise import Supervisor
from echelon.launch.supervision.verdict import Verdict

FAILS_UNTIL = """
import os, signal, sys
path, times = sys.argv[1:]
with open(path, "a") as file:
    print("started", file=file)
if len(open(path).readlines()) <= int(times):
    os.kill(os.getpid(), signal.SIGKILL)
"""


@dataclass
class Again:
    """Restarts any process that fails, as a child."""

    commands: list[Command]
    restarts: Restarts = field(default_factory=lambda: Restarts(2))

    def ends_job(self, name: str) -> bool:
        return False

    def plan(self, name: str, code: int, now: float) -> Restart | None:
        return self.restarts.next(name, now)

    def start(self, name: str, number: int) -> RunningProcess:
        return start_child(next(command for command in self.commands if command.name == name))


def failing(tmp_path: Path, name: str, times: int) -> Command:
    """Return a command that kills itself the first `times` times."""
    arguments = [sys.executable, "-c", FAILS_UNTIL, str(tmp_path / name), str(times)]
    return Command(name, arguments, {}, essential=name.startswith("server"), judge=name.startswith("scheduler"))


def run(*commands: Command) -> int:
    return Supervisor(restarter=Again([*commands])).run(commands)


WAITS_FOR_END_OF = "import sys, time\nwhile len(open(sys.argv[1]).readlines()) < 3: time.sleep(0.01)"


def waiting(tmp_path: Path, name: str) -> Command:
    """Return a worker that ends when a process has been started for the third time."""
    (tmp_path / name).touch()
    return Command("worker 0", [sys.executable, "-c", WAITS_FOR_END_OF, str(tmp_path / name)], {}, essential=False)


def test_a_server_that_is_killed_is_restarted_and_the_job_succeeds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    began = time.monotonic()
    assert run(failing(tmp_path, "server 0", 2), waiting(tmp_path, "server 0")) == 0
    assert time.monotonic() - began >= 0.2 + 0.4
    first, second, whole = capsys.readouterr().err.splitlines()
    assert first.startswith("echelon: server 0 (pid ")
    assert first.endswith(") was killed by signal 9; restart 1 of 2 in 0.2 s")
    assert second.endswith(") was killed by signal 9; restart 2 of 2 in 0.4 s")
    assert whole.startswith("echelon: the result is whole, although server 0 (pid ")
    assert whole.count(" was killed by signal 9 and was restarted") == 2


def test_a_server_that_is_killed_too_often_ends_the_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(failing(tmp_path, "server 0", 3), waiting(tmp_path, "nothing")) == 137
    *_, last = capsys.readouterr().err.splitlines()
    assert last.startswith("echelon: server 0 (pid ")
    assert last.endswith(") was killed by signal 9")
    assert (tmp_path / "server 0").read_text() == "started\n" * 3


def test_a_process_that_waits_for_its_restart_is_not_restarted_after_a_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def plan_and_interrupt(self: Again, name: str, code: int, now: float) -> Restart:
        os.kill(os.getpid(), signal.SIGINT)
        return Restart(1, 1, now + 3600.0)

    monkeypatch.setattr(Again, "plan", plan_and_interrupt)
    assert run(failing(tmp_path, "server 0", 1), waiting(tmp_path, "nothing")) == 130
    assert (tmp_path / "server 0").read_text() == "started\n"


EXITS = "import sys; sys.exit(int(sys.argv[1]))"
STOPS_ITSELF = "import os, signal; print('stops', os.getpid(), flush=True); os.kill(os.getpid(), signal.SIGSTOP)"


def exiting(name: str, status: int, text: str = "") -> Command:
    program = f"print({text!r}) if {text!r} else None\n{EXITS}"
    arguments = [sys.executable, "-c", program, str(status)]
    return Command(name, arguments, {}, essential=not name.startswith("worker"), judge=name.startswith("scheduler"))


def test_a_stopped_worker_that_was_declared_dead_is_ended_with_the_job(capsys: pytest.CaptureFixture[str]) -> None:
    stopped = Command("worker 1", [sys.executable, "-c", STOPS_ITSELF], {}, essential=False)
    supervisor = Supervisor(lambda name, text: supervisor.set_lost(name, 1), has_ledger=lambda: True)
    assert supervisor.run([exiting("scheduler 0", 0), exiting("worker 0", 0), stopped]) == 0
    printed = capsys.readouterr().err
    assert printed.startswith("echelon: the result is whole, although worker 1 (pid ")
    assert printed.endswith(") did not return to the job, and was ended with it\n")


def test_a_worker_whose_host_is_lost_ends_with_that_reason_although_the_job_was_over_before(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The launcher learns of a lost host late. Until then the worker is like one that is stopped."""
    own, agent = socket.socketpair()
    remote = RemoteProcess("worker 1", "h1", PipeStream(own.fileno(), own.fileno()))
    agent.sendall(encode(Hello("h1", 6, "")) + encode(Started(7)))
    why = "the result is not whole: worker 1 died"
    supervisor = Supervisor(start=lambda command: remote if command.name == "worker 1" else start_child(command))
    supervisor.set_lost("worker 1", 7)
    commands = [exiting("scheduler 0", 3, why), exiting("worker 0", 0), Command("worker 1", [], {}, essential=False)]
    with own, agent:
        supervisor.watch(agent.fileno(), lambda: agent.shutdown(socket.SHUT_RDWR))  # when the launcher kills it
        assert supervisor.run(commands) == 3
    lost = "worker 1 (pid 7 on h1) was lost: the other side closed the connection"
    assert capsys.readouterr().err == f"echelon: {why} ({lost})\n"


FAILS_THEN_WAITS = """
import os, sys, time
with open(sys.argv[1], "a") as file:
    print("started", os.getpid(), file=file)
if len(open(sys.argv[1]).readlines()) == 1:
    sys.exit(7)
while True:
    time.sleep(0.01)  # uses CPU time, as a process that tries to connect
"""


def restarted_late(tmp_path: Path, status: int) -> list[Command]:
    """Return a job that is over when its worker 1, which failed, has been restarted and has not joined yet."""
    times = tmp_path / "worker 1"
    times.touch()
    waits = [sys.executable, "-c", WAITS_FOR_END_OF.replace("< 3", "< 2"), str(times)]
    ends = [sys.executable, "-c", f"{waits[2]}\nsys.exit({status})", str(times)]
    return [
        Command("scheduler 0", waits, {}, essential=True, judge=True),
        Command("worker 0", ends, {}, essential=False),
        Command("worker 1", [sys.executable, "-c", FAILS_THEN_WAITS, str(times)], {}, essential=False),
    ]


def test_a_restarted_worker_that_has_not_joined_is_ended_with_the_job_and_is_no_loss(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = restarted_late(tmp_path, 0)
    assert Supervisor(has_ledger=lambda: True, restarter=Again(commands, Restarts(1))).run(commands) == 0
    first, last = capsys.readouterr().err.splitlines()
    who = f"worker 1 (pid {(tmp_path / 'worker 1').read_text().split()[1]})"
    assert first == f"echelon: {who} exited with status 7; restart 1 of 1 in 0.2 s"
    assert last == f"echelon: the result is whole, although {who} exited with status 7 and was restarted"


def test_a_restarted_worker_that_has_joined_is_not_ended_with_the_scheduler(tmp_path: Path) -> None:
    """It may still evaluate. The scheduler ends after the launcher knows that the worker has joined."""
    times, joined, done = tmp_path / "worker 1", tmp_path / "joined", tmp_path / "done"
    evaluates = f"print('joined', flush=True)\ntime.sleep(1.0)\nopen({str(done)!r}, 'w')"
    program = FAILS_THEN_WAITS.partition("while True")[0] + evaluates
    waits = f"import os, time\nwhile not os.path.exists({str(joined)!r}): time.sleep(0.01)"
    commands = [
        Command("scheduler 0", [sys.executable, "-c", waits], {}, essential=True, judge=True),
        Command("worker 1", [sys.executable, "-c", program, str(times)], {}, essential=False),
    ]

    def take(name: str, text: str) -> None:
        supervisor.set_lost(name, None)
        joined.touch()

    supervisor = Supervisor(take, has_ledger=lambda: True, restarter=Again(commands, Restarts(1)))
    assert supervisor.run(commands) == 0
    assert done.exists()


def test_without_a_worker_that_finished_the_worker_that_failed_decides_and_not_its_successor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = restarted_late(tmp_path, 0)
    del commands[1]
    assert Supervisor(has_ledger=lambda: True, restarter=Again(commands, Restarts(1))).run(commands) == 7
    *_, last = capsys.readouterr().err.splitlines()
    pid = (tmp_path / "worker 1").read_text().split()[1]
    assert last == f"echelon: worker 1 (pid {pid}) exited with status 7"


def test_a_worker_is_not_restarted_after_the_scheduler_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Again, "plan", lambda self, name, code, now: Restart(1, 1, now + 3600.0))
    times = tmp_path / "worker 1"
    commands = restarted_late(tmp_path, 0)
    waits = [sys.executable, "-c", WAITS_FOR_END_OF.replace("< 3", "< 1"), str(times)]
    commands[:2] = [replace(command, arguments=waits) for command in commands[:2]]
    assert Supervisor(has_ledger=lambda: True, restarter=Again(commands)).run(commands) == 0
    *_, last = capsys.readouterr().err.splitlines()
    assert last.endswith(") exited with status 7")
    assert len(times.read_text().splitlines()) == 1


def test_a_worker_that_has_returned_is_not_ended_with_the_servers(tmp_path: Path) -> None:
    supervisor = Supervisor()
    supervisor.set_lost("worker 0", 1)
    supervisor.set_lost("worker 0", None)
    still_works = f"import time\ntime.sleep(1.0)\nopen({str(tmp_path / 'done')!r}, 'w')"
    worker = Command("worker 0", [sys.executable, "-c", still_works], {}, essential=False)
    assert supervisor.run([exiting("scheduler 0", 0), worker]) == 0
    assert (tmp_path / "done").exists()


def test_a_server_that_was_declared_dead_is_killed_and_restarted(tmp_path: Path) -> None:
    """It may be stopped, and cannot take its place again."""
    times = tmp_path / "server 0"
    program = f"open({str(times)!r}, 'a').write('started\\n')\nif len(open({str(times)!r}).readlines()) == 1:\n "
    server = Command("server 0", [sys.executable, "-c", program + STOPS_ITSELF], {}, essential=True)
    until_twice = WAITS_FOR_END_OF.replace("< 3", "< 2")
    times.touch()
    worker = Command("worker 0", [sys.executable, "-c", until_twice, str(times)], {}, essential=False)
    commands = [server, worker]
    supervisor = Supervisor(
        lambda name, text: supervisor.set_lost("server 0", int(text.split()[1])), restarter=Again(commands, Restarts(1))
    )
    assert supervisor.run(commands) == 0
    assert times.read_text() == "started\n" * 2


def test_the_scheduler_says_that_the_result_is_not_whole(capsys: pytest.CaptureFixture[str]) -> None:
    why = "the result is not whole: worker 1 was lost"
    assert Supervisor().run([exiting("scheduler 0", 3, why), exiting("worker 0", 0)]) == 3
    assert capsys.readouterr().err == f"echelon: {why}\n"


@pytest.mark.parametrize(("has_ledger", "status"), [(True, 0), (False, 5)])
def test_a_worker_that_failed_is_covered_by_others_only_in_a_job_with_a_ledger(has_ledger: bool, status: int) -> None:
    """Without one, a program that ends with an error leaves the job first, and the scheduler counts it as finished."""
    late = Command("scheduler 0", [sys.executable, "-c", "import time; time.sleep(1)"], {}, essential=True, judge=True)
    commands = [late, exiting("worker 0", 0), exiting("worker 1", 5)]
    assert Supervisor(has_ledger=lambda: has_ledger).run(commands) == status


def test_a_worker_that_fails_long_after_the_verdict_of_the_scheduler_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echelon.launch.supervision.supervise.JUDGED_S", 0.1)
    late = Command("worker 1", [sys.executable, "-c", "import time, sys; time.sleep(1); sys.exit(5)"], {}, False)
    commands = [exiting("scheduler 0", 0), exiting("worker 0", 0), late]
    assert Supervisor(has_ledger=lambda: True).run(commands) == 5


KILLS_ITSELF = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
STILL_EVALUATES = Command("worker 0", [sys.executable, "-c", "import time; time.sleep(0.5)"], {}, essential=False)
WAITS = "import time; time.sleep(0.7)"


def ended_by_a_kill(victim: str, verdict: Verdict | None, worker: Command = STILL_EVALUATES) -> int:
    """Return the status of a job whose scheduler has given a verdict when a server or the scheduler is killed."""
    programs = {"scheduler 0": WAITS, "server 0": WAITS} | {victim: KILLS_ITSELF}
    commands = [
        Command(name, [sys.executable, "-c", program], {}, essential=True, judge=name == "scheduler 0")
        for name, program in programs.items()
    ]
    return Supervisor(lambda name, text: print(name, text), verdict=lambda: verdict).run([*commands, worker])


@pytest.mark.parametrize("victim", ["server 0", "scheduler 0"])
def test_a_process_that_is_killed_after_the_end_of_the_job_does_not_change_the_result(
    victim: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended_by_a_kill(victim, Verdict(0, "")) == 0
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    assert line.startswith(f"echelon: the result is whole, although {victim} (pid ")
    assert line.endswith(") was killed by signal 9")


def test_a_scheduler_that_is_killed_after_its_verdict_has_said_why_the_result_is_not_whole(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert ended_by_a_kill("scheduler 0", Verdict(3, "the result is not whole: worker 1 was lost")) == 3
    assert capsys.readouterr().err.startswith("echelon: the result is not whole: worker 1 was lost (scheduler 0 (pid ")


def test_without_a_verdict_of_the_scheduler_it_is_not_known_whether_the_result_is_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All workers have finished before the scheduler is killed."""
    done = tmp_path / "done"
    waits = f"import os, time\nwhile not os.path.exists({str(done)!r}): time.sleep(0.01)\ntime.sleep(0.5)\n"
    scheduler = Command("scheduler 0", [sys.executable, "-c", waits + KILLS_ITSELF], {}, essential=True, judge=True)
    worker = Command("worker 0", [sys.executable, "-c", f"open({str(done)!r}, 'w')"], {}, essential=False)
    assert Supervisor().run([scheduler, worker]) == 3
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("echelon: it is not known whether the result is whole, because scheduler 0 (pid ")
    assert line.endswith(") was killed by signal 9")


def test_a_job_that_the_scheduler_stops_names_the_worker_and_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    stops = Command(
        "scheduler 0", [sys.executable, "-c", "import time, sys; time.sleep(1); sys.exit('too few')"], {}, True
    )
    assert Supervisor().run([replace(stops, judge=True), exiting("worker 0", 7)]) == 7
    printed = capsys.readouterr().err
    assert printed.startswith("echelon: worker 0 (pid ")
    assert printed.endswith(") exited with status 7; too few\n")


def test_a_job_with_too_few_workers_says_so_although_the_scheduler_names_the_same_worker(
    capsys: pytest.CaptureFixture[str],
) -> None:
    why = "job stopped: 1 worker is left, and the job needs 2 (--min-workers)"
    program = f"import time, sys; time.sleep(1); sys.exit('{why}: worker 0 (pid 7 on host) died: x')"
    stops = Command("scheduler 0", [sys.executable, "-c", program], {}, essential=True, judge=True)
    assert Supervisor().run([stops, exiting("worker 0", 7)]) == 7
    assert capsys.readouterr().err.endswith(f") exited with status 7; {why}\n")


def test_the_reason_of_the_scheduler_is_last_although_a_server_ends_before_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The servers receive the reason, too, and the launcher stops the others when the first of them has ended."""
    why = "job stopped: 1 worker is left, and the job needs 2 (--min-workers): worker 1 (pid 7 on host) died: x"
    waits = [sys.executable, "-c", "import time; time.sleep(30)"]
    scheduler = Command("scheduler 0", waits, {}, essential=True, judge=True)
    stops = [sys.executable, "-c", "import sys, time; time.sleep(1); sys.exit('server stops: why')"]
    server = Command("server 0", stops, {}, essential=True)
    supervisor = Supervisor(verdict=lambda: Verdict(1, why))
    assert supervisor.run([scheduler, server, exiting("worker 2", 7), exiting("worker 0", 1)]) == 7
    assert capsys.readouterr().err.splitlines()[-1].endswith(f") exited with status 7; {why}")


SCHEDULER = """
import os, signal, socket, sys
listener = socket.socket(fileno=int(os.environ["ECHELON_LISTEN_FD"]))
number = os.environ["ECHELON_RESTARTS"]
with open(os.environ["ECHELON_JOINED_FILE"], "a") as notes:
    notes.write("job started\\n")
connection, _ = listener.accept()
connection.sendall(number.encode())
connection.close()
if number == "0":
    os.kill(os.getpid(), signal.SIGKILL)
"""
WORKER = """
import os, socket
rank = os.environ["ECHELON_RANK"]
with open(os.environ["ECHELON_JOINED_FILE"], "a") as notes:
    notes.write(f"{rank} dist_sync\\n")
address = os.environ["DMLC_PS_ROOT_URI"], int(os.environ["DMLC_PS_ROOT_PORT"])
for _ in range(2):
    with socket.create_connection(address) as connection:
        print("scheduler", connection.recv(9).decode(), flush=True)
"""
LAUNCHERS = [LocalLauncher(), PipeLauncher()]


def launch(
    launcher: Launcher,
    scheduler: str,
    worker: str,
    lines: list[str],
    *,
    num_workers: int = 1,
    max_restarts: int = 3,
    options: Sequence[str] = ("-E",),
) -> int:
    """Run a job whose scheduler and workers are these programs. With an option, Python programs are not forked."""
    job = Job(num_workers=num_workers, num_servers=1, max_restarts=max_restarts, security="none")
    plan = launcher.plan(Request(job, [sys.executable, *options, "-c", worker]))
    programs = {"scheduler": scheduler, "server": "pass"}
    processes = tuple(
        replace(one, arguments=[sys.executable, *options, "-c", programs[one.role]]) if one.role in programs else one
        for one in plan.processes
    )
    return launcher.run(replace(plan, processes=processes), Output(lambda name, text: lines.append(f"{name}: {text}")))


@pytest.mark.parametrize("launcher", LAUNCHERS, ids=lambda launcher: launcher.name)
def test_a_killed_scheduler_comes_back_at_the_same_address(launcher: Launcher) -> None:
    """The second connection is made while no scheduler runs, and waits."""
    lines: list[str] = []
    assert launch(launcher, SCHEDULER, WORKER, lines) == 0
    assert lines == ["worker 0: scheduler 0", "worker 0: scheduler 1"]


KILLED_TWICE = """
import os, signal
rank, number = os.environ["ECHELON_RANK"], int(os.environ["ECHELON_RESTARTS"])
with open(os.environ["ECHELON_JOINED_FILE"], "a") as notes:
    notes.write(f"{rank} dist_sync\\n{rank} joined\\n{rank} NOTE\\n")
print("start", number, flush=True)
if number < 2 and rank == "1":
    os.kill(os.getpid(), signal.SIGKILL)
open(f"FOLDER/{rank}", "w").close()
"""
WAITS_FOR = """
import os, time
while not os.path.exists("FOLDER/RANK"):
    time.sleep(0.01)
"""


def killed_twice(folder: Path, note: str) -> str:
    """Return the program of workers that write a note. The first two processes of worker 1 are killed."""
    return KILLED_TWICE.replace("NOTE", note).replace("FOLDER", str(folder))


def waits_for(folder: Path, rank: int) -> str:
    """Return the program of a scheduler that ends after this worker."""
    return WAITS_FOR.replace("FOLDER", str(folder)).replace("RANK", str(rank))


@pytest.mark.parametrize(
    ("launcher", "options"),
    [
        pytest.param(LocalLauncher(), ["-E"], id="local"),
        pytest.param(LocalLauncher(), [], id="forked"),
        pytest.param(PipeLauncher(), ["-E"], id="pipes"),
    ],
)
def test_a_killed_worker_of_a_job_with_a_ledger_is_restarted(
    launcher: Launcher, options: list[str], tmp_path: Path
) -> None:
    lines: list[str] = []
    worker = killed_twice(tmp_path, "ledger")
    assert launch(launcher, waits_for(tmp_path, 1), worker, lines, num_workers=2, options=options) == 0
    assert sorted(lines) == ["worker 0: start 0", *(f"worker 1: start {number}" for number in range(3))]


@pytest.mark.parametrize(("note", "max_restarts"), [("dist_sync", 3), ("ledger", 0)])
def test_a_killed_worker_is_not_restarted_without_a_ledger_or_with_max_restarts_0(
    note: str, max_restarts: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines: list[str] = []
    worker = killed_twice(tmp_path, note)
    launch(LocalLauncher(), waits_for(tmp_path, 0), worker, lines, num_workers=2, max_restarts=max_restarts)
    assert sorted(lines) == ["worker 0: start 0", "worker 1: start 0"]
    assert "; restart " not in capsys.readouterr().err


def test_a_process_that_fails_before_the_job_has_started_ends_it(capsys: pytest.CaptureFixture[str]) -> None:
    crashes = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    assert launch(LocalLauncher(), crashes, "import time; time.sleep(600)", []) == 137
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("echelon: scheduler 0 (pid ")
    assert line.endswith(") was killed by signal 9")
