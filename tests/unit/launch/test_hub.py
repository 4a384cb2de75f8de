"""The hub: agents connect over real sockets, prove the credentials, and get the process of their task."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from echelon.environment import Job
from echelon.launch.agents.channel_stream import ChannelStream
from echelon.launch.agents.hub import Hub
from echelon.launch.agents.messages import Alive, Hello, Output, Started, encode
from echelon.launch.agents.remote import RemoteProcess
from echelon.launch.hosts import Host
from echelon.launch.plan import PlannedProcess, Request, make_plan
from echelon.transport.admission import admission
from echelon.transport.admission.admission import ConnectionRefused, connect
from echelon.transport.admission.credentials import Credentials, Security

SECURITY = Security("auto", Credentials.create())


class Job3:
    """A hub with a server and two workers."""

    def __init__(self) -> None:
        self.hub = Hub("127.0.0.1", SECURITY)
        self.processes: list[RemoteProcess] = [self.hub.connect(planned) for planned in planned_processes()]
        self.agents: list[ChannelStream] = []

    def agent(self, *messages: Hello | Output | Started | Alive, security: Security = SECURITY) -> ChannelStream:
        """Connect an agent that sends messages at once, and let the hub handle all of it."""
        result: list[ChannelStream | BaseException] = []

        def run() -> None:
            try:
                stream = ChannelStream(connect(self.hub.address, security, 10.0))
                stream.write(b"".join(map(encode, messages)))
                result.append(stream)
            except BaseException as error:
                result.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        while thread.is_alive():
            self.hub.turn()
            thread.join(0.001)
        if isinstance(result[0], BaseException):
            raise result[0]
        self.hub.turn()
        self.agents.append(result[0])
        return result[0]

    def close(self) -> None:
        for agent in self.agents:
            agent.close()
        for process in self.processes:
            process.fail("the test ends")
            process.close()
        self.hub.close()


def planned_processes() -> list[PlannedProcess]:
    plan = make_plan(Request(Job(num_workers=2, num_servers=1), ["train"]))
    return [process for process in plan.processes if process.role != "scheduler"]


@pytest.fixture
def job() -> Iterator[Job3]:
    made = Job3()
    yield made
    made.close()


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all processes believe that they are on different machines, so that they use TLS."""
    monkeypatch.setattr(admission, "on_one_machine", lambda own, peer: False)


def hello(task: int | None, host: str = "h") -> Hello:
    return Hello(host, 1, "digest", task)


def read(process: RemoteProcess) -> bytes:
    data = bytearray()
    while part := process.read_output():
        data += part
    return bytes(data)


def closed(agent: ChannelStream) -> bool:
    while (data := agent.read()) is None:
        pass
    return not data


def test_the_number_of_a_task_decides_which_process_it_runs(job: Job3) -> None:
    for task in (2, 0, 1):
        job.agent(hello(task, f"host{task}"))
    assert [(process.name, process.host) for process in job.processes] == [
        ("server 0", "host0"),
        ("worker 0", "host1"),
        ("worker 1", "host2"),
    ]
    assert job.hub.missing == []


def test_agents_without_numbers_get_processes_in_the_order_of_arrival(job: Job3) -> None:
    job.agent(hello(None, "first"))
    job.agent(hello(None, "second"))
    assert [process.host for process in job.processes[:2]] == ["first", "second"]
    assert [process.name for process in job.hub.missing] == ["worker 1"]


def test_the_hosts_of_a_plan_keep_their_names(job: Job3) -> None:
    plan = make_plan(Request(Job(num_workers=1), ["train"], (Host("10.0.0.1"),)))
    planned = job.hub.connect(plan.processes[0])
    job.processes.append(planned)
    job.agent(hello(3, "the-name-of-its-own"))
    assert planned.has_connected
    assert planned.host == "10.0.0.1"


@pytest.mark.parametrize("task", [0, 3, -1])
def test_a_task_that_is_taken_or_does_not_exist_is_refused(
    job: Job3, task: int, capfd: pytest.CaptureFixture[str]
) -> None:
    first = job.agent(hello(0, "first"))
    second = job.agent(hello(task, "second"))
    assert closed(second)
    expected = "task 0 already runs server 0 on first" if task == 0 else f"the job has 3 tasks, not task {task}"
    assert f"the launcher refused a connection from 127.0.0.1: {expected}" in capfd.readouterr().err
    assert job.processes[0].host == "first"
    assert first.read() is None, "the living agent keeps its connection"


def test_one_agent_too_many_is_refused(job: Job3, capfd: pytest.CaptureFixture[str]) -> None:
    agents = [job.agent(hello(None)) for _ in range(4)]
    assert closed(agents[3])
    assert "the job has 3 tasks, and this is one more" in capfd.readouterr().err


def test_an_agent_that_does_not_say_hello_first_is_refused(job: Job3, capfd: pytest.CaptureFixture[str]) -> None:
    assert closed(job.agent(Alive()))
    assert "its first message is Alive, not Hello" in capfd.readouterr().err


def test_other_credentials_are_refused(job: Job3, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConnectionRefused, match="credentials of the two processes differ"):
        job.agent(hello(0), security=Security("auto", Credentials.create()))
    assert [process.has_connected for process in job.processes] == [False] * 3
    assert "the launcher refused a connection" in capfd.readouterr().err


@pytest.mark.usefixtures("far")
def test_messages_that_follow_hello_at_once_reach_the_process_over_tls(job: Job3) -> None:
    lines = bytes(range(256)) * 1000
    agent = job.agent(hello(1), Started(77), Output(lines))
    process = job.processes[1]
    received = b""
    while len(received) < len(lines):
        agent.flush()
        received += read(process)
    assert received == lines
    assert process.hello == hello(1)
    assert process.pid == 77
    agent.close()
    while process.exit_code() is None:
        process.read_output()
    assert process.how_ended().startswith("was lost: ")
