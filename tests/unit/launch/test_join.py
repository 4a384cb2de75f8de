"""Joining a running job: the command that the launcher prints, and the workers that it starts."""

from __future__ import annotations

import selectors
import shlex
import socket
import stat
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from echelon.cli.main import main, make_parser
from echelon.environment import Job
from echelon.errors import JobError, UsageError
from echelon.launch.interface import Output
from echelon.launch.join import join_plan, parse_address, run_join, with_secret
from echelon.launch.join_line import JoinLine
from echelon.launch.plan import Address, Plan, Request, make_plan
from echelon.launch.run import protect
from echelon.observe.events import EventLog
from echelon.transport.admission.admission import Admission, Strangers
from echelon.transport.admission.credentials import Credentials, Security, write_credentials
from echelon.transport.control import connect_to_scheduler

HERE = Address("127.0.0.1", 4711)


def plan(**settings: object) -> Plan:
    job = replace(Job(num_workers=2, num_servers=1, max_workers=4), **settings)  # type: ignore[arg-type]
    return protect(make_plan(Request(job, ["python", "train.py", "--lr", "0.1"])))


def test_the_launcher_names_the_command_once_and_the_secret_is_in_a_file_of_the_user() -> None:
    elastic = plan(run_dir="runs/a b")
    line = JoinLine(elastic)
    assert line.take(None) is None, "the address is not known yet"
    text = line.take(HERE)
    assert text is not None
    assert line.take(HERE) is None
    assert text.startswith("up to 2 more workers can join this job: echelon join 127.0.0.1:4711 --job-workers 2 ")
    assert elastic.job.credentials is not None
    assert elastic.job.credentials not in text
    given = shlex.split(text.partition(": echelon ")[2])
    options = make_parser(given).parse_args(given)
    assert (options.job_workers, options.job_servers) == (2, 1)
    assert options.run_dir == str(Path.cwd() / "runs/a b"), "it may be started in another folder"
    assert options.max_restarts is None
    assert options.program == ["python", "train.py", "--lr", "0.1"]
    file = Path(options.credentials_file)
    assert file.read_text().strip() == elastic.job.credentials
    assert stat.S_IMODE(file.stat().st_mode) & 0o077 == 0
    line.close()
    assert not file.exists()


def test_a_job_that_takes_no_more_workers_prints_no_command() -> None:
    assert JoinLine(plan(max_workers=None)).take(HERE) is None
    assert JoinLine(plan(max_workers=2)).take(HERE) is None


def test_a_file_of_the_user_and_missing_protection_are_in_the_command() -> None:
    own = plan().with_settings(credentials_file="/home/me/secret")
    assert "--credentials-file /home/me/secret --" in str(JoinLine(own).take(HERE))
    insecure = str(JoinLine(plan(security="none")).take(HERE))
    assert "--insecure --" in insecure
    assert "credentials" not in insecure


def test_the_command_has_absolute_paths_and_the_restarts_of_the_job() -> None:
    own = plan(max_restarts=7).with_settings(credentials_file="secret")
    assert f"--max-restarts 7 --credentials-file {Path.cwd() / 'secret'} --" in str(JoinLine(own).take(HERE))


def test_other_credentials_are_one_error_that_names_the_file_to_give(capsys: pytest.CaptureFixture[str]) -> None:
    security = Security("auto", Credentials.create())
    with socket.create_server(("127.0.0.1", 0)) as listener, selectors.DefaultSelector() as selector:
        admission = Admission(listener, security, selector, Strangers("the scheduler", EventLog(None, "scheduler", 0)))
        is_done = threading.Event()

        def admit() -> None:
            while not is_done.is_set():
                for key, _ in selector.select(0.05):
                    admission.advance(key.data)

        server = threading.Thread(target=admit)
        server.start()
        with pytest.raises(JobError) as caught:
            run_join(join_plan(plan().job, Address(*listener.getsockname()), ["train"], 1), Output())
        is_done.set()
        server.join()
        admission.close()
    assert "the credentials of the two processes differ" in str(caught.value)
    assert "--credentials-file" in str(caught.value)
    assert "ECHELON_CREDENTIALS" not in str(caught.value)


def test_a_new_worker_has_no_rank_but_the_numbers_of_the_job() -> None:
    job = Job(num_workers=2, num_servers=1, rank=1, credentials_file="secret")
    first, second = join_plan(job, HERE, ["train"], 2).processes
    assert (first.name, second.name) == ("new worker 0", "new worker 1")
    environment = second.environment
    assert "ECHELON_RANK" not in environment
    assert (environment["DMLC_PS_ROOT_URI"], environment["DMLC_PS_ROOT_PORT"]) == ("127.0.0.1", "4711")
    assert (environment["DMLC_NUM_WORKER"], environment["DMLC_NUM_SERVER"]) == ("2", "1")
    assert environment["ECHELON_CREDENTIALS_FILE"] == "secret"


@pytest.mark.parametrize("text", ["4711", ":4711", "host", "host:", "host:port", "host:0", "host:99999"])
def test_an_address_without_host_or_port_is_rejected(text: str) -> None:
    with pytest.raises(UsageError, match="is not the address of a scheduler; write HOST:PORT"):
        parse_address(text)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("host:1", "no command to run; give it last, as in: echelon join HOST:PORT -- python train.py"),
        ("host:1 -n 0 -- echo", "the number of workers (-n) must be 1 or more, not 0"),
        ("host:1 --job-servers 0 -- echo", "--job-workers and --job-servers must be 1 or more, not 1 and 0"),
    ],
)
def test_invalid_flags_of_join(given: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["join", *given.split()]) == 2
    assert capsys.readouterr().err == f"echelon: {message}\n"


def test_an_address_where_nobody_listens_is_one_error(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert main(["join", f"127.0.0.1:{port}", "--insecure", "--", "echo"]) == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith(f"echelon: no scheduler answers at 127.0.0.1:{port}: ")


def test_a_file_that_was_removed_with_its_job_is_one_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gone = tmp_path / "credentials"
    assert main(["join", "127.0.0.1:1", "--credentials-file", str(gone), "--", "echo"]) == 2
    assert capsys.readouterr().err == (
        f"echelon: the credentials file {gone} does not exist; that of a launcher exists only on its machine, and "
        "only while its job runs\n"
    )


def test_new_workers_get_the_secret_itself_because_the_file_may_be_gone_when_they_start(tmp_path: Path) -> None:
    file, job = tmp_path / "credentials", plan().job
    assert job.credentials is not None
    write_credentials(file, Credentials.parse(job.credentials, "the job"))
    joining = with_secret(join_plan(replace(job, credentials=None, credentials_file=str(file)), HERE, ["train"], 1))
    environment = joining.processes[0].environment
    assert environment["ECHELON_CREDENTIALS"] == job.credentials
    assert "ECHELON_CREDENTIALS_FILE" not in environment


def test_a_worker_that_joins_a_job_that_has_just_ended_does_not_wait() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    job = join_plan(Job(security="none"), Address("127.0.0.1", port), ["train"], 1).processes[0].job
    with pytest.raises(JobError, match=rf"the job at 127\.0\.0\.1:{port} has ended before this worker joined it"):
        connect_to_scheduler(job, 60.0, "worker")
