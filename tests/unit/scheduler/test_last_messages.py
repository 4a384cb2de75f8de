"""A process that says why it leaves and closes its connection has left, whatever the scheduler sends it meanwhile."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from echelon.cluster.membership.rules import Rules
from echelon.cluster.messages import Leave, Member, Register, Return
from echelon.environment import Job
from echelon.observe.events import EventLog, EventReader
from echelon.scheduler.loop import Scheduler
from echelon.transport.admission.admission import connect
from echelon.transport.admission.channel import Channel, send_all
from echelon.transport.admission.credentials import Security
from echelon.transport.control import frame
from echelon.transport.listening import listen

WORKERS = 3


def test_a_worker_that_leaves_while_views_are_sent_to_it_has_not_died(tmp_path: Path) -> None:
    listener = listen("127.0.0.1")
    port = listener.getsockname()[1]
    job = Job(role="scheduler", scheduler_port=port, num_workers=WORKERS, security="none", run_dir=str(tmp_path))
    with EventLog(tmp_path, "scheduler", 0) as events:
        scheduler = Scheduler(job, listener, events)
        channels = _join(scheduler, job)
        for channel in channels:
            send_all(channel, frame(Leave("it finished")), 5.0)
            channel.close()
        for peer in list(scheduler._peers.values()):  # the selector reports them in different turns
            scheduler._read(peer)
            scheduler._remove_failed()
        assert scheduler.run() == 0
    reasons = [event["reason"] for event in EventReader(tmp_path).poll() if event["event"] == "view"]
    assert reasons
    assert all(reason.endswith("left: it finished") for reason in reasons), reasons


def _join(scheduler: Scheduler, job: Job) -> list[Channel]:
    """Return the connections of all workers of the job, which has started."""

    def join(rank: int) -> Channel:
        channel = connect(("127.0.0.1", job.scheduler_port), Security.of(job), 10.0)
        send_all(channel, frame(Register("worker", rank, "127.0.0.1", 1, "")), 5.0)
        return channel

    with ThreadPoolExecutor(WORKERS) as pool:
        joining: list[Future[Channel]] = [pool.submit(join, rank) for rank in range(WORKERS)]
        while not scheduler._membership.running:
            scheduler._turn()
        return [future.result() for future in joining]


def test_a_worker_that_leaves_while_a_restarted_scheduler_waits_for_others_has_not_died(tmp_path: Path) -> None:
    """Its connection is closed before the members of the job are known."""
    listener = listen("127.0.0.1")
    port = listener.getsockname()[1]
    job = Job(role="scheduler", scheduler_port=port, num_workers=2, security="none", run_dir=str(tmp_path))
    members = [Member("worker", rank, "127.0.0.1", 1, "", f"token {rank}") for rank in range(2)]
    with EventLog(tmp_path, "scheduler", 0) as events, ThreadPoolExecutor(1) as pool:
        scheduler = Scheduler(job, listener, events, Rules(is_restarted=True))
        for member in members:
            returning = pool.submit(_return_and_leave, job, member, members)
            while not returning.done():
                scheduler._turn()
            returning.result()
            scheduler._turn()
        assert scheduler.run() == 0
    reasons = [event["reason"] for event in EventReader(tmp_path).poll() if event["event"] == "view"]
    first, *left = reasons
    assert first == "the scheduler was started again, and 2 processes returned"
    assert left
    assert all(reason.endswith("left: it finished") for reason in left), left


def _return_and_leave(job: Job, member: Member, members: list[Member]) -> None:
    channel = connect(("127.0.0.1", job.scheduler_port), Security.of(job), 10.0)
    for message in (Return(member, 3, members, []), Leave("it finished")):
        send_all(channel, frame(message), 5.0)
    channel.close()
