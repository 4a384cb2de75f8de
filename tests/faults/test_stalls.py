"""Late workers are reported, silent ones are declared dead, invalid messages are rejected; the others continue."""

from __future__ import annotations

import os
import re
import signal
import socket
import struct
from contextlib import closing
from pathlib import Path

import pytest

from echelon import environment as job_environment
from echelon.cluster.messages import Barrier, Failed, Halt, Push, PushHeader, decode_response, encode
from echelon.errors import NOT_WHOLE
from echelon.scheduler.peer import MAX_FRAME
from echelon.transport.admission.admission import connect
from echelon.transport.admission.channel import send_all
from echelon.transport.admission.credentials import Security
from echelon.transport.control import frame
from echelon.transport.sockets import TcpTransport
from jobs import Fault, Gate, Job, Plan, Row, until
from leaks import listening_ports, read_environment

AT_THE_GATE = (
    r"server 0 holds key 'narrow'(?: and 1 more)? at clock 3 "
    r"for worker 1 to push clock 2 \(last push \d+\.\d s ago\)"
)


def test_a_stopped_worker_is_declared_dead_and_reports_it_when_it_continues(tmp_path: Path) -> None:
    plan = Plan(
        "dist_sync",
        2,
        faults=[Fault("worker", 1, 2, signal=signal.SIGSTOP)],
        gates=[Gate(0, 6, opened="open")],
    )
    with Job(tmp_path, plan, environment={"PS_HEARTBEAT_TIMEOUT": "2"}) as job:
        until(lambda: job.at_clock(0, 6), "worker 0 continues alone")
        (stopped,) = job.fired()
        (view,) = until(lambda: job.events("view"), "a view without worker 1")
        os.kill(stopped["pid"], signal.SIGCONT)
        until(lambda: stopped["pid"] not in job.processes(), "the end of worker 1")
        (job.run / "open").touch()
        assert job.wait() == NOT_WHOLE, "worker 0 finished, and nobody has trained the rest of worker 1"
    assert re.fullmatch(
        rf"worker 1 \(pid {stopped['pid']} on 127\.0\.0\.1\) died: no message for [2-4]\.\d s", view["reason"]
    )
    line = r"error: worker 1: the scheduler removed this worker from the job: .*no message for [2-4]\.\d s"
    assert re.search(line, job.out)
    assert job.results()[0]["table"] == plan.table(), "what it pushed afterwards was not applied"


def test_a_stall_is_reported_and_invalid_messages_do_no_harm(tmp_path: Path) -> None:
    plan = Plan("dist_sync", 2, gates=[Gate(1, 2, opened="open")])
    with Job(tmp_path, plan, options=("--stall-seconds", "1")) as job:
        until(lambda: job.at_clock(1, 2), "worker 1 at its gate")
        (server_port,) = listening_ports(job.pid("server", 0))
        (scheduler_port,) = listening_ports(job.pid("scheduler", 0))
        security = security_of(job.pid("scheduler", 0))
        disturb_server(server_port, security)
        disturb_scheduler(scheduler_port, security)
        until(
            lambda: len(malformed(job, "server 0")) >= 2 and malformed(job, "scheduler 0") and job.events("stranger"),
            "all counted",
        )
        until(lambda: stalls_at_the_gate(job), "a stall report")
        (job.run / "open").touch()
        assert job.wait() == 0, job.out
    counts = [row["count"] for row in malformed(job, "server 0")]
    assert counts == list(range(1, len(counts) + 1))
    assert job.out.count("; the server ends the connection") == 1, "it prints the first"
    assert malformed(job, "scheduler 0")[-1]["count"] == 3, "they are counted, and written seldom"
    refused = "the scheduler refused a connection from 127.0.0.1: its first bytes are not those of Echelon's protocol"
    assert job.out.count(refused) == 1
    stall = stalls_at_the_gate(job)[0]
    found = re.search(rf"^\[worker 0\] worker 0 has waited (\d+\.\d) s: {AT_THE_GATE}$", job.out, re.MULTILINE)
    assert found is not None, job.out
    assert float(found[1]) == pytest.approx(stall["seconds"], abs=0.06)
    assert stall["seconds"] > 1
    assert all("left: it finished" in view["reason"] for view in job.events("view"))
    assert all(row["halted"] is None for row in job.results().values()), (
        "a process outside the job cannot halt the workers"
    )
    assert {rank: row["table"] for rank, row in job.results().items()} == {0: plan.table(), 1: plan.table()}


def stalls_at_the_gate(job: Job) -> list[Row]:
    """Return the reports of the gate. On a busy machine a worker may also be late earlier."""
    return [row for row in job.events("stall") if re.fullmatch(AT_THE_GATE, row["waiting"])]


def malformed(job: Job, who: str) -> list[Row]:
    return [row for row in job.events("malformed") if row["who"] == who]


def security_of(pid: int) -> Security:
    """Return the credentials of a job's process: a process of the job may be wrong, too."""
    return Security.of(job_environment.Job.from_environment(read_environment(pid)))


def disturb_server(port: int, security: Security) -> None:
    """Send bytes of another protocol, invalid messages, and a valid one from a process that is not in the job."""
    with socket.create_connection(("127.0.0.1", port)) as raw:
        raw.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(range(256)))
    for message in ([b"\xff not a request", b"frame"], [b""]):
        with closing(TcpTransport(security).connect("stranger", [f"tcp://127.0.0.1:{port}"])) as stranger:
            stranger.send(0, message)
    with closing(TcpTransport(security).connect("stranger", [f"tcp://127.0.0.1:{port}"])) as stranger:
        stranger.send(0, [encode(Push(7, 0, [0, 1], PushHeader(), True, False))])
        received = stranger.recv(10)
        assert received is not None, "a process outside the job gets an answer"
        answer = decode_response(received[1][0])
    assert isinstance(answer, Failed)
    assert "not in the view" in answer.reason


def disturb_scheduler(port: int, security: Security) -> None:
    """Send bytes of another protocol, a length beyond the limit, an invalid body, half a frame, and commands.

    All come over connections that have proved the credentials; at last, one has not.
    """
    invalid = [b"GET / HTTP/1.1\r\n\r\n", struct.pack("!I", MAX_FRAME + 1), struct.pack("!I", 3) + b"\xff\xff\xff"]
    for data in [*invalid, struct.pack("!I", 100) + b"half", frame(Halt("stop")) + frame(Barrier(99))]:
        with closing(connect(("127.0.0.1", port), security, 10.0)) as peer:
            send_all(peer, data, 10.0)
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
