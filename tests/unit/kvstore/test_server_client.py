"""A worker's requests: answers in any order, refusals, lost requests, stalls, deadlines."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import pytest
from fake_servers import FakeServers, FakeSession, RecordingLog

from echelon.cluster.messages import (
    Ask,
    Contents,
    Done,
    Failed,
    GetStates,
    Pull,
    Push,
    PushHeader,
    Retire,
    States,
    Status,
)
from echelon.errors import JobError, UsageError
from echelon.kvstore.servers import client as client_module
from echelon.kvstore.servers.client import Client, Ticket
from echelon.server.storage.write_log import LOG_BYTES, WriteLog, Written

STALL_S, TIMEOUT_S = 10.0, 60.0


class Setup:
    """A client whose servers do not answer by themselves."""

    def __init__(self) -> None:
        self.servers = FakeServers(num_servers=2, answer=lambda server, request: None)
        self.session, self.log = FakeSession(), RecordingLog()
        self.session.addresses = ["tcp://here:1", "tcp://there:2"]
        self.client = Client(self.servers, self.session, self.log, STALL_S, TIMEOUT_S)

    def send(self, server: int = 0, frames: tuple[bytes, ...] = ()) -> Ticket:
        return self.client.send(server, Retire(self.client.next_id()), frames)

    def when_asked(self, answer: Callable[[Ask], Status | None]) -> None:
        """Answer every `Ask` from now on."""
        send = self.servers.send

        def send_and_answer(peer: int, frames: list[bytes]) -> None:
            send(peer, frames)
            request = self.servers.sent[-1][1]
            if isinstance(request, Ask) and (status := answer(request)) is not None:
                self.servers.deliver(peer, status)

        self.servers.send = send_and_answer  # type: ignore[assignment, method-assign]


@pytest.fixture
def setup(monkeypatch: pytest.MonkeyPatch) -> Setup:
    made = Setup()
    monkeypatch.setattr(time, "monotonic", made.servers.now)
    return made


def test_a_request_goes_to_its_server_with_its_frames(setup: Setup) -> None:
    setup.send(1, (b"one", b"two"))
    assert setup.servers.sent == [(1, Retire(1), [b"one", b"two"])]


def test_answers_may_come_in_any_order(setup: Setup) -> None:
    first, second = setup.send(0), setup.send(1)
    assert not setup.client.ready([first, second])
    setup.servers.deliver(1, Done(second.id, version=7))
    assert setup.client.ready([second])
    assert not setup.client.ready([first, second])
    setup.servers.deliver(0, Done(first.id))
    setup.client.wait([first, second])
    assert (first.response, second.response) == (Done(first.id), Done(second.id, version=7))
    assert setup.servers.now() == 0, "neither call waited"


def test_call_returns_the_answer(setup: Setup) -> None:
    setup.servers.answer = lambda server, request: States(request.id, [])
    assert setup.client.call(0, GetStates(setup.client.next_id())) == States(1, [])


def test_frames_of_an_answer_go_to_the_given_memory(setup: Setup) -> None:
    memory = bytearray(6)
    places = [memoryview(memory)[:2], memoryview(memory)[2:]]
    ticket = setup.client.send(0, Pull(setup.client.next_id(), 0, [0], True), places=places)
    assert setup.servers.placer is not None
    head = memoryview(b"\x00 not an answer")
    assert setup.servers.placer(0, head, [2, 4]) is None
    setup.servers.deliver(0, (Done(ticket.id), [b"ab", b"cdef"]))
    setup.client.wait([ticket])
    assert memory == b"abcdef"


def test_frames_without_a_place_stay_with_the_ticket(setup: Setup) -> None:
    ticket = setup.client.send(0, GetStates(setup.client.next_id()))
    setup.servers.deliver(0, (States(ticket.id, []), [b"state"]))
    setup.client.wait([ticket])
    assert [bytes(frame) for frame in ticket.frames] == [b"state"]


# --- errors


def test_a_refusal_is_raised_once_and_at_once(setup: Setup) -> None:
    open_ticket, refused = setup.send(), setup.send()
    setup.servers.deliver(0, Failed(refused.id, "key 3 is unknown"))
    with pytest.raises(UsageError, match="worker 0: key 3 is unknown"):
        setup.client.wait([open_ticket, refused])
    setup.client.wait([refused])


@pytest.mark.parametrize(("removed", "error"), [("removed: its machine is gone", JobError), (None, UsageError)])
def test_a_removed_worker_gets_the_scheduler_s_reason_if_it_comes(
    setup: Setup, removed: str | None, error: type[Exception]
) -> None:
    ticket = setup.send()
    setup.session.removed = removed
    setup.servers.deliver(0, Failed(ticket.id, "worker 0 is not in the view", not_in_view=True))
    with pytest.raises(error, match=removed or "worker 0: worker 0 is not in the view"):
        setup.client.wait([ticket])


def test_a_broken_job_ends_the_wait(setup: Setup) -> None:
    ticket = setup.send()
    setup.session.broken = "server 1 died"
    with pytest.raises(JobError, match="server 1 died"):
        setup.client.wait([ticket])


def test_nothing_is_sent_after_the_worker_has_left(setup: Setup) -> None:
    ticket = setup.send()
    setup.session.left = True
    for call in (lambda: setup.send(), lambda: setup.client.wait([ticket]), lambda: setup.client.ready([ticket])):
        with pytest.raises(UsageError, match="closed"):
            call()
    assert len(setup.servers.sent) == 1


def test_malformed_and_repeated_answers_are_dropped(setup: Setup) -> None:
    ticket = setup.send()
    setup.servers.deliver(0, b"\xc1 not msgpack")
    setup.servers.deliver(0, Done(ticket.id, version=1))
    setup.servers.deliver(0, Done(ticket.id, version=2))
    setup.client.wait([ticket])
    other = setup.send()
    assert not setup.client.ready([other])
    assert ticket.response == Done(ticket.id, version=1)
    assert setup.client.malformed == 1
    assert [kind for kind, _ in setup.log.events] == ["malformed"]


# --- late answers


def test_a_lost_request_is_sent_again(setup: Setup) -> None:
    """Also one that nobody waits for: the lost request may be the push that another worker's answer depends on."""
    lost, waited = setup.send(1, (b"gradient",)), setup.send(0)

    def answer(asked: Ask) -> Status:
        if asked.about == waited.id:
            setup.servers.deliver(0, Done(waited.id))
        return Status(asked.id, asked.about, known=asked.about != lost.id, waiting="")

    setup.when_asked(answer)
    setup.client.wait([waited])
    assert not setup.client.ready([lost])
    assert setup.servers.requests(Retire)[-1] == (1, Retire(lost.id), [b"gradient"])
    assert ("resent", {"server": 1, "request": lost.id}) in setup.log.events


def test_a_stall_report_names_whom_the_server_waits_for(setup: Setup, capfd: pytest.CaptureFixture[str]) -> None:
    ticket = setup.send()
    setup.when_asked(lambda asked: Status(asked.id, asked.about, known=True, waiting="server 0 waits for worker 3"))
    with pytest.raises(JobError, match=r"worker 0: no answer in 6\d s: server 0 waits for worker 3"):
        setup.client.wait([ticket])
    lines = capfd.readouterr().err.splitlines()
    assert lines[0] == "worker 0 has waited 11.0 s: server 0 waits for worker 3"
    assert 5 <= len(lines) <= 6, "one line per STALL_S until the deadline"
    assert [facts["waiting"] for kind, facts in setup.log.events if kind == "stall"] == [
        "server 0 waits for worker 3"
    ] * len(lines)


def test_servers_that_do_not_answer_are_reported_and_named_at_the_deadline(
    setup: Setup, capfd: pytest.CaptureFixture[str]
) -> None:
    tickets = [setup.send(1), setup.send(0)]
    both = (
        r"the server of slice 0 at tcp://here:1 has not answered for {0} s; "
        r"the server of slice 1 at tcp://there:2 has not answered for {0} s"
    )
    with pytest.raises(JobError, match=r"worker 0: no answer in 6\d s: " + both.format(r"6\d\.\d")):
        setup.client.wait(tickets)
    lines = capfd.readouterr().err.splitlines()
    assert lines[0] == f"worker 0 has waited 11.0 s: {both.format('11.0')}"
    assert 5 <= len(lines) <= 6, "one line per STALL_S until the deadline"


def test_a_server_that_falls_silent_is_not_reported_with_what_it_said_before(
    setup: Setup, capfd: pytest.CaptureFixture[str]
) -> None:
    setup.session.addresses[1] = None
    tickets = [setup.send(0), setup.send(1)]
    last = 20.0

    def answer(asked: Ask) -> Status | None:
        known = Status(asked.id, asked.about, known=True, waiting="server 0 waits for worker 3")
        return known if asked.about == tickets[0].id and setup.servers.now() < last else None

    setup.when_asked(answer)
    with pytest.raises(JobError):
        setup.client.wait(tickets)
    first, *_, end = capfd.readouterr().err.splitlines()
    assert first.endswith("s: server 0 waits for worker 3; no server stores slice 1 now")
    assert re.search(r"s: the server of slice 0 at tcp://here:1 has not answered for [34]\d\.\d s; no server", end)


def test_a_server_whose_connection_broke_is_asked_at_once_about_its_requests(setup: Setup) -> None:
    lost, other = setup.send(0), setup.send(1)
    setup.when_asked(lambda ask: Status(ask.id, ask.about, known=False, waiting=""))
    setup.servers.broken.add(0)
    assert not setup.client.ready([lost, other])
    asked = [(server, ask.about) for server, ask, _ in setup.servers.requests(Ask)]
    assert asked == [(0, lost.id)]
    assert not setup.client.ready([lost, other])  # it takes the answer: the server has not received the request
    assert [server for server, _, _ in setup.servers.requests(Retire)] == [0, 1, 0]
    setup.servers.broken.add(0)
    assert not setup.client.ready([lost, other])
    assert len(setup.servers.requests(Ask)) == 1, "a connection that breaks again at once is not used more often"
    assert setup.servers.now() == 0


def test_a_version_is_that_of_the_keys_of_its_answer(setup: Setup) -> None:
    """A worker that gives a lost server its weights back must not claim an update that it has not seen."""
    for keys, version in (([0, 1, 2], 5), ([0], 6), ([2], 4)):
        ticket = setup.client.send(0, Pull(setup.client.next_id(), 0, keys, True))
        setup.servers.deliver(0, Done(ticket.id, contents=[Contents(version, {})]))
        setup.client.wait([ticket])
    pushed = setup.client.send(0, Push(setup.client.next_id(), 3, [1], PushHeader(), False, True))
    setup.servers.deliver(0, Done(pushed.id))  # of a push without a pull, whose answer has no weights
    setup.client.wait([pushed])
    assert versions(setup.client, 0) == {0: 6, 1: 5, 2: 5}
    assert versions(setup.client, 1) == {}


def versions(client: Client, server: int) -> dict[int, int]:
    return {key: contents.version for key, contents in client.contents(server).items()}


def test_keys_of_one_answer_may_contain_different_updates(setup: Setup) -> None:
    ticket = setup.client.send(0, Pull(setup.client.next_id(), 0, [0, 1, 2], True))
    contents = [Contents(5, {0: 3, 1: 2}, [0, 2]), Contents(4, {0: 3, 1: 1}, [1])]
    setup.servers.deliver(0, Done(ticket.id, contents=contents))
    setup.client.wait([ticket])
    assert setup.client.contents(0) == {0: contents[0], 1: contents[1], 2: contents[0]}


def pulled(setup: Setup, keys: list[int], *contents: Contents) -> None:
    ticket = setup.client.send(0, Pull(setup.client.next_id(), 0, keys, False))
    setup.servers.deliver(0, Done(ticket.id, contents=list(contents)))
    setup.client.wait([ticket])


def noted(log: WriteLog, request: int, *contents: Contents, ends: bool = True) -> None:
    log.begin([Written(request, list(contents))])
    if ends:
        log.end()


@pytest.fixture
def notes() -> WriteLog:
    return WriteLog(memoryview(bytearray(LOG_BYTES)))


def test_what_a_lost_server_wrote_and_did_not_answer_is_known_from_its_notes(setup: Setup, notes: WriteLog) -> None:
    pulled(setup, [0, 1, 2], Contents(4, {0: 2}))
    noted(notes, 1, Contents(4, {0: 2}))  # of the request that was answered
    ticket = setup.client.send(0, Pull(setup.client.next_id(), 0, [0, 1], False))
    noted(notes, ticket.id, Contents(5, {0: 3}))
    noted(notes, 7, Contents(6, {0: 4}, [2]), ends=False)
    setup.client.adopt_notes(0, notes)
    expected = {0: Contents(5, {0: 3}), 1: Contents(5, {0: 3}), 2: Contents(6, {0: 4}, [2], (4, {0: 2}))}
    assert setup.client.contents(0) == expected
    assert notes.notes() == [], "the next server begins with an empty log"
    setup.client.adopt_notes(0, notes)
    assert setup.client.contents(0) == expected


def test_weights_that_were_written_in_part_are_complete_when_the_next_server_has_written_them(
    setup: Setup, notes: WriteLog
) -> None:
    """It may have taken the weights of another worker, so that its version is lower."""
    pulled(setup, [0, 1], Contents(4, {0: 2}))
    noted(notes, 7, Contents(6, {0: 4}, [0, 1]), ends=False)
    setup.client.adopt_notes(0, notes)
    pulled(setup, [0], Contents(5, {0: 3}))
    noted(notes, 8, Contents(5, {0: 3}, [1]))
    setup.client.adopt_notes(0, notes)
    assert setup.client.contents(0) == {0: Contents(5, {0: 3}), 1: Contents(5, {0: 3}, [1])}


def test_weights_that_were_written_in_part_twice_contain_what_they_had_before_the_first_time(
    setup: Setup, notes: WriteLog
) -> None:
    noted(notes, 7, Contents(6, {0: 4}, [0]), ends=False)
    setup.client.adopt_notes(0, notes)
    noted(notes, 8, Contents(6, {0: 4}, [0]), ends=False)
    setup.client.adopt_notes(0, notes)
    assert setup.client.contents(0) == {0: Contents(6, {0: 4}, [0], (0, {}))}


def test_versions_are_kept_however_many_lists_of_keys_a_program_uses(setup: Setup) -> None:
    for version in range(1, client_module._MAX_ANSWERS + 3):
        ticket = setup.client.send(0, Pull(setup.client.next_id(), 0, [version % 3], True))
        setup.servers.deliver(0, Done(ticket.id, contents=[Contents(version, {})]))
        setup.client.wait([ticket])
    last = client_module._MAX_ANSWERS + 2
    assert versions(setup.client, 0) == {key: max(v for v in range(last + 1) if v % 3 == key) for key in range(3)}
    assert len(setup.client._contents) < 3


def test_open_pushes_have_clocks(setup: Setup) -> None:
    for clock in (4, 5):
        setup.client.send(0, Push(setup.client.next_id(), clock, [7, 8], PushHeader(), False, True))
    setup.client.send(1, Push(setup.client.next_id(), 5, [7], PushHeader(), False, True))
    assert setup.client.unanswered_pushes(0) == {7: [4, 5], 8: [4, 5]}
