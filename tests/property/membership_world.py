"""Processes of a simulated job around the scheduler's state machine, and a naive model of what must hold.

A process acts as those of `kvstore/servers/session.py`, `store_session.py` and `server/serve.py` do: it keeps what it
has received, goes on while it is cut off, and returns with what it knows then. Messages to a process that is cut off
are dropped, and so are its own; those of a process that is deaf arrive, but not what it is answered.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from echelon.cluster.membership.members import Send
from echelon.cluster.membership.membership import Membership
from echelon.cluster.membership.rules import Rules
from echelon.cluster.messages import (
    SERVER,
    WORKER,
    Abort,
    Barrier,
    BarrierDone,
    ControlMessage,
    Finish,
    FromProcess,
    HeldSlice,
    Leave,
    Member,
    Outcome,
    Refused,
    Register,
    Registered,
    Removed,
    Return,
    Roster,
    Slice,
    StoreClosed,
    StoreEnded,
    StoreEnding,
    StoreIsAt,
    StoreJoined,
    StoreOpened,
    StoreState,
    View,
)
from echelon.observe.events import EventLog
from echelon.scheduler.dispatch import Dispatch


@dataclass
class Store:
    """One worker's part in a store."""

    reached: int = 0
    awaited: int = 0  # the last barrier that it called; a late worker does not wait for those that it has missed
    done: int = 0
    ending: bool = False
    ended: bool = False
    is_late: bool = False
    position: int | None = None  # of a late worker, which waits for it when it opens the store
    joining: bool = False

    @property
    def takes_part(self) -> bool:
        """Whether others wait for this worker: one that waits for the end does, also if it was late."""
        return self.ending or not self.is_late


@dataclass
class Process:
    """A process of the job. `connection` is 0 when the scheduler has closed it, or has noticed that it is lost."""

    role: str
    rank: int | None
    pid: int
    token: str
    connection: int
    is_cut: bool = False  # nothing arrives in either direction
    is_deaf: bool = False  # what the scheduler sends does not arrive
    is_alive: bool = True
    has_joined: bool = False
    is_removed: bool = False  # it was told so, and has not joined again
    is_late: bool = False
    is_over: bool = False
    has_left: bool = False
    view: int = 0
    members: list[Member] = field(default_factory=list)
    slices: list[Slice] = field(default_factory=list)
    outcome: Outcome = field(default_factory=Outcome)
    stores: dict[int, Store] = field(default_factory=dict)
    num_opened: int = 0
    synced: set[int] = field(default_factory=set)  # slices whose present backup this server has filled

    @property
    def can_send(self) -> bool:
        return bool(self.connection) and not self.is_cut

    @property
    def is_connected(self) -> bool:
        """Whether messages arrive in both directions."""
        return self.can_send and not self.is_deaf

    @property
    def can_act(self) -> bool:
        """Whether it uses stores: it does not know that it was removed, and is not about to join."""
        return self.is_alive and self.has_joined and not self.is_removed and not self.is_over

    def waits_for_position(self, number: int) -> bool:
        """Whether it is in `Session.open_store` or `rejoin`."""
        return self.is_late and self.stores[number].position is None

    @property
    def name(self) -> str:
        return f"{self.role} {self.rank} {self.token}"

    def member(self) -> Member:
        assert self.rank is not None
        return Member(self.role, self.rank, "host", self.pid, "", self.token)

    def register(self) -> Register:
        return Register(self.role, self.rank, "host", self.pid, "", self.token)

    def report(self) -> Return:
        states = [
            StoreState(number, store.reached, store.done, store.ending, takes_part=not store.is_late)
            for number, store in self.stores.items()
        ]
        mine = [(number, one) for number, one in enumerate(self.slices) if self.rank == one.primary]
        held = [HeldSlice(number, True, number in self.synced) for number, _ in mine] if self.role == SERVER else []
        return Return(self.member(), self.view, self.members, self.slices, states, held, self.num_opened, self.outcome)

    def take_view(self, number: int, members: list[Member], slices: list[Slice], outcome: Outcome) -> None:
        assert number >= self.view, f"{self.name}: view {number} after {self.view}"
        before, after = _backups(self.slices, self.members), _backups(slices, members)
        self.synced = {n for n in self.synced if n < len(slices) and before[n] == after[n]}
        self.view, self.members, self.slices, self.outcome = number, members, slices, outcome


def _tokens(members: list[Member]) -> set[str]:
    return {member.token for member in members}


def _backups(slices: list[Slice], members: list[Member]) -> list[str | None]:
    """Return the tokens of the backups of slices."""
    tokens = {member.rank: member.token for member in members if member.role == SERVER}
    return [None if one.backup is None else tokens.get(one.backup) for one in slices]


class World:
    """A scheduler, processes, and the naive model: who is a member, and which servers have which slice."""

    def __init__(self, num_workers: int, num_servers: int, rules: Rules) -> None:
        self.sizes = (num_workers, num_servers)
        self.rules = rules
        self.now = 0.0
        self.processes: list[Process] = []
        self.living: dict[str, Process] = {}  # the members of the job, by token
        self.holders: list[set[str]] = []  # of each slice, the tokens of the servers that have all of it
        self.reports: dict[str, Return] = {}  # of those that have returned to a scheduler that waits for them
        self.num_restarts, self.restarted_at = 0, 0.0
        self.roster: Roster | None = None
        self._last = 0
        self.start_scheduler(rules)
        for role, count in ((SERVER, num_servers), (WORKER, num_workers)):
            for rank in range(count):
                self.add(role, rank)

    # --- the scheduler

    def start_scheduler(self, rules: Rules) -> None:
        self.membership = Membership(*self.sizes, rules)
        self.membership.has_ledger = True  # so that the job waits for new workers
        self.dispatch = Dispatch(self.membership, EventLog(None, "scheduler", 0), self.sizes[1])

    def restart_scheduler(self) -> None:
        """Lose the scheduler, and start it again.

        A member that the first new scheduler removed while it was cut off, and that is still cut off when that one is
        lost, too, does not return: it could be taken for the job if it came first. A network cut that outlasts two
        losses of the scheduler is beyond the failure model (docs/reliability.md).
        """
        if self.num_restarts:
            for process in self.processes:
                if process.has_joined and not process.is_removed and process.token not in self.living:
                    process.is_alive = False
        self.num_restarts += 1
        self.restarted_at = self.now
        self.start_scheduler(replace(self.rules, is_restarted=True))
        self.reports = {}
        for process in self.processes:
            process.connection = 0

    def tick(self, seconds: float) -> None:
        self.now += seconds
        was_running = self.membership.running
        self.finish(self.dispatch.tick(self.now), was_running)

    def send(self, process: Process, message: FromProcess) -> None:
        """Let a process send a message, which is lost if it is cut off."""
        if process.can_send:
            was_running = self.membership.running
            self.finish(self.handle(process.connection, message), was_running)

    def handle(self, connection: int, message: FromProcess) -> list[Send]:
        """Handle a message. A process that leaves, or registers as another one, is not a member any more."""
        member = self.membership.member(connection)
        if member is not None and not self.membership.is_rebuilding:
            is_another = isinstance(message, Register) and message.token != member.token
            if is_another or isinstance(message, Leave):
                self.living.pop(member.token, None)
        return self.dispatch.handle(connection, message)

    def lose(self, process: Process) -> None:
        """Let the scheduler notice that the connection of a process is lost."""
        connection, process.connection = process.connection, 0
        member = self.membership.member(connection)
        if not self.membership.is_rebuilding and member is not None:
            self.living.pop(member.token, None)  # its own token may be newer, if it was told that it was removed
        if not process.has_left:  # a message that it leaves is handled when the members are known
            self.reports = {token: report for token, report in self.reports.items() if report.member.pid != process.pid}
        self.deliver(self.dispatch.lost(connection, "lost"))

    def finish(self, sends: list[Send], was_running: bool) -> None:
        """Deliver what the scheduler sends, and let it handle the messages that it has kept, as its loop does."""
        if self.membership.running and not was_running and self.reports:
            self.count_returned()
        self.deliver(sends)
        connections = {process.connection for process in self.processes}
        for connection, message in self.dispatch.take_kept():
            if connection in connections or self.membership.member(connection) is not None:
                was_running = self.membership.running
                self.finish(self.handle(connection, message), was_running)

    def count_returned(self) -> None:
        """The job continues with those that have returned, as far as the newest view that one of them knows lists them.

        A member that was removed by an earlier scheduler, without anybody who returns knowing it, is one again. Those
        that have not returned are removed before anybody is told, so that no barrier waits for them.
        """
        newest = max(self.reports.values(), key=lambda report: report.view)
        listed = {member.token for member in newest.members}
        by_pid = {process.pid: process for process in self.processes}
        returned = {token: by_pid[report.member.pid] for token, report in self.reports.items()}
        self.living = {token: process for token, process in returned.items() if token in listed}
        self.reports = {}

    # --- the processes

    def server(self, rank: int) -> Process:
        return next(p for p in self.living.values() if (p.role, p.rank) == (SERVER, rank))

    def add(self, role: str, rank: int | None) -> Process:
        self._last += 1
        process = Process(role, rank, self._last, f"t{self._last}", self._last)
        self.processes.append(process)
        self.send(process, process.register())
        return process

    def connect(self, process: Process) -> None:
        """Let a process that is cut off or deaf come back on a new connection. Others of its own are closed then.

        One that was removed and has not joined again yet returns like others: it does so from another thread.
        """
        self._last += 1
        process.connection, process.is_cut, process.is_deaf = self._last, False, False
        report = process.report() if process.has_joined else process.register()
        if isinstance(report, Return) and not self.membership.running:
            self.reports[process.token] = report
        self.send(process, report)
        for number, store in process.stores.items():
            if store.joining and process.has_joined:
                self.send(process, StoreJoined(number))

    def leave(self, process: Process, *, failed: bool) -> None:
        """Let a process leave. It closes its connection at once."""
        process.is_alive, process.has_left = False, True
        self.send(process, Leave("done", failed))
        self.lose(process)

    def rejoin(self, process: Process) -> None:
        self._last += 1
        process.token = f"t{self._last}"
        process.has_joined = False
        process.stores = {number: Store(is_late=True) for number in process.stores}  # until it has opened them again
        self.send(process, process.register())

    def deliver(self, sends: list[Send]) -> None:
        by_connection = {p.connection: p for p in self.processes if p.connection}
        for to, message in sends:
            if (process := by_connection.get(to)) is None:
                continue
            if isinstance(message, Roster):
                self.admit(process, message)
            if process.is_alive and process.is_connected:
                self.receive(process, message)

    def admit(self, process: Process, roster: Roster) -> None:
        """A process is a member when the scheduler sends the roster, also if it does not receive it."""
        if self.roster is None or not (roster.late or process.token in _tokens(self.roster.members)):
            self.start_job(roster)
        process.rank = next(member.rank for member in roster.members if member.token == process.token)
        is_new = process.token not in self.living
        self.living[process.token] = process
        if roster.late and is_new and process.role == SERVER:
            self.adopt_slices(process, roster)

    def receive(self, process: Process, message: ControlMessage) -> None:
        match message:
            case Registered(rank):
                process.rank = rank
            case Roster() if not process.has_joined:
                process.view = 0  # nobody returned to a new scheduler, so the job of this roster may be another one
                process.take_view(message.view, message.members, message.slices, message.outcome)
                process.is_late, process.has_joined, process.is_removed = message.late, True, False
                self.open_again(process)
            case View():
                if process.has_joined and not process.is_removed:
                    process.take_view(message.number, message.members, message.slices, message.outcome)
                self.record_sync(message)
            case Removed() if process.has_joined:
                self.reports.pop(process.token, None)
                process.is_removed = True
                if process.role == SERVER:  # it ends
                    process.is_alive, process.is_cut = False, True
            case Refused() | Abort() | Finish():
                process.is_over = True
            case BarrierDone(sequence, number):
                self.barrier_done(process, number, sequence)
            case StoreEnded(number) if (store := process.stores.get(number)) is not None:
                assert all(p.stores[number].ending for p in self.participants(number)), "not all wait for the end"
                store.ended = True
            case StoreIsAt(number, barriers, takes_part) if (store := process.stores.get(number)) is not None:
                if not takes_part:
                    store.position, store.done, store.is_late = barriers, max(store.done, barriers), True
                elif store.joining or store.position is None:
                    store.position, store.reached = barriers, max(store.reached, barriers)
                    store.joining = store.is_late = False

    def start_job(self, roster: Roster) -> None:
        """All processes are new. The scheduler may have been started again, and nobody of an earlier job returned."""
        waited = self.now - self.restarted_at
        assert not self.num_restarts or waited >= self.rules.return_s, "the members of the job may still return"
        self.roster = roster
        by_token = {process.token: process for process in self.processes}
        self.living = {member.token: by_token[member.token] for member in roster.members}
        tokens = {member.rank: member.token for member in roster.members if member.role == SERVER}
        self.holders = [{tokens[s] for s in (one.primary, one.backup) if s is not None} for one in roster.slices]

    def open_store(self, process: Process) -> None:
        process.stores[process.num_opened] = Store(is_late=process.is_late)
        process.num_opened += 1
        self.send(process, StoreOpened(process.num_opened - 1))

    def open_again(self, process: Process) -> None:
        opened, stores = process.num_opened, process.stores
        for number in range(opened):
            if number in stores:
                stores[number] = Store(is_late=True)
            self.send(process, StoreOpened(number))
            if number not in stores:
                assert process.rank is not None
                self.send(process, StoreClosed(number, process.rank))

    def adopt_slices(self, process: Process, roster: Roster) -> None:
        """A new server recovers the slices that nobody has, and is an empty backup of others."""
        for number, one in enumerate(roster.slices):
            if one.primary == process.rank:
                assert not self.holders[number] & self.living.keys(), "a server that has the slice lives"
                self.holders[number] = {process.token}

    def record_sync(self, view: View) -> None:
        for number, one in enumerate(view.slices):
            if one.backup is not None and one.in_sync:
                member = next((m for m in view.members if (m.role, m.rank) == (SERVER, one.backup)), None)
                if member is not None:
                    self.holders[number].add(member.token)

    # --- barriers

    def participants(self, number: int) -> list[Process]:
        """The members that a barrier of a store waits for. One that is not late and has not opened it yet counts."""
        return [
            process
            for process in self.living.values()
            if process.role == WORKER and number in process.stores and process.stores[number].takes_part
        ]

    def barrier_done(self, process: Process, number: int, sequence: int) -> None:
        store = process.stores.get(number)
        if store is None or sequence <= store.done:
            return
        waits = [p.name for p in self.participants(number) if not p.stores[number].ending]
        late = [p.name for p in self.participants(number) if p.name in waits and p.stores[number].reached < sequence]
        assert not late, f"{process.name}: barrier {sequence} of store {number} does not wait for {late}"
        store.done = sequence

    def reach(self, process: Process, number: int) -> None:
        store = process.stores[number]
        store.reached += 1
        store.awaited = store.reached
        self.send(process, Barrier(store.reached, number))

    def end(self, process: Process, number: int) -> None:
        store = process.stores[number]
        store.ending = True
        self.send(process, StoreEnding(number))
