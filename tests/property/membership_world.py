"""Processes of a simulated job around the scheduler's state machine, and a naive model of what must hold.

A process acts as those of `kvstore/servers/session.py` and `server/serve.py` do: it keeps what it has received, and
returns with it when its connection was lost. Messages to a process that is cut off are dropped, and so are its own.
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
    done: int = 0
    ending: bool = False
    ended: bool = False
    takes_part: bool = True
    joining: bool = False


@dataclass
class Process:
    """A process of the job. `connection` is None while it is cut off."""

    role: str
    rank: int | None
    pid: int
    token: str
    connection: int | None
    last_connection: int
    is_alive: bool = True
    has_joined: bool = False
    is_removed: bool = False
    is_late: bool = False
    is_over: bool = False
    view: int = 0
    members: list[Member] = field(default_factory=list)
    slices: list[Slice] = field(default_factory=list)
    outcome: Outcome = field(default_factory=Outcome)
    stores: dict[int, Store] = field(default_factory=dict)
    num_opened: int = 0
    synced: set[int] = field(default_factory=set)  # slices whose present backup this server has filled

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
            StoreState(number, store.reached, store.done, store.ending, takes_part=store.takes_part)
            for number, store in self.stores.items()
        ]
        mine = [(number, one) for number, one in enumerate(self.slices) if self.rank == one.primary]
        held = [HeldSlice(number, True, number in self.synced) for number, _ in mine] if self.role == SERVER else []
        return Return(self.member(), self.view, self.members, self.slices, states, held, self.num_opened, self.outcome)

    def take_view(self, number: int, members: list[Member], slices: list[Slice], outcome: Outcome) -> None:
        assert number >= self.view, f"{self.name}: view {number} after {self.view}"
        backups = [one.backup for one in self.slices]
        self.synced = {n for n in self.synced if n < len(slices) and slices[n].backup == backups[n]}
        self.view, self.members, self.slices, self.outcome = number, members, slices, outcome


class World:
    """A scheduler, processes, and the naive model: who is a member, and which servers have which slice."""

    def __init__(self, num_workers: int, num_servers: int, rules: Rules) -> None:
        self.sizes = (num_workers, num_servers)
        self.rules = rules
        self.now = 0.0
        self.processes: list[Process] = []
        self.living: dict[str, Process] = {}  # the members of the job, by token
        self.holders: list[set[str]] = []  # of each slice, the tokens of the servers that have all of it
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
        self.num_restarts += 1
        self.restarted_at = self.now
        self.start_scheduler(replace(self.rules, is_restarted=True))
        for process in self.processes:
            process.connection, process.last_connection = None, 0

    def tick(self, seconds: float) -> None:
        self.now += seconds
        was_rebuilding = self.membership.is_rebuilding
        self.deliver(self.dispatch.tick(self.now))
        self.after(was_rebuilding)

    def send(self, process: Process, message: FromProcess) -> None:
        """Let a process send a message, which is lost if it is cut off."""
        if process.connection is None:
            return
        was_rebuilding = self.membership.is_rebuilding or not self.membership.running
        self.deliver(self.dispatch.handle(process.connection, message))
        self.after(was_rebuilding)

    def lose(self, process: Process) -> None:
        """Let the scheduler notice that the last connection of a process is lost."""
        process.connection = None
        if not self.membership.is_rebuilding and self.membership.member(process.last_connection) is not None:
            self.living.pop(process.token, None)
        self.deliver(self.membership.lost(process.last_connection, "lost"))

    def after(self, was_rebuilding: bool) -> None:
        if was_rebuilding and self.membership.running:
            self.living = {t: p for t, p in self.living.items() if self.membership.connection_of(t) is not None}
        for connection, message in self.dispatch.take_kept():
            sender = next((process for process in self.processes if process.connection == connection), None)
            if sender is not None:
                if isinstance(message, Leave):
                    self.living.pop(sender.token, None)
                self.deliver(self.dispatch.handle(connection, message))

    # --- the processes

    def server(self, rank: int) -> Process:
        return next(p for p in self.living.values() if (p.role, p.rank) == (SERVER, rank))

    def add(self, role: str, rank: int | None) -> Process:
        self._last += 1
        process = Process(role, rank, self._last, f"t{self._last}", self._last, self._last)
        self.processes.append(process)
        self.send(process, process.register())
        return process

    def connect(self, process: Process) -> None:
        """Let a process that is cut off come back on a new connection."""
        self._last += 1
        process.connection = process.last_connection = self._last
        self.send(process, process.report() if process.has_joined else process.register())
        for number, store in process.stores.items():
            if store.joining:
                self.send(process, StoreJoined(number))

    def rejoin(self, process: Process) -> None:
        self._last += 1
        process.token = f"t{self._last}"
        process.has_joined = False
        self.send(process, process.register())

    def deliver(self, sends: list[Send]) -> None:
        by_connection = {p.connection: p for p in self.processes if p.connection is not None and p.is_alive}
        for to, message in sends:
            if (process := by_connection.get(to)) is not None:
                self.receive(process, message)

    def receive(self, process: Process, message: ControlMessage) -> None:
        match message:
            case Registered(rank):
                process.rank = rank
            case Roster():
                process.take_view(message.view, message.members, message.slices, message.outcome)
                process.is_late, process.has_joined, process.is_removed = message.late, True, False
                if not message.late and message is not self.roster:
                    self.start_job(message)
                self.living[process.token] = process
                if message.late:
                    self.open_again(process)
                if message.late and process.role == SERVER:
                    self.adopt_slices(process)
            case View():
                process.take_view(message.number, message.members, message.slices, message.outcome)
                self.record_sync(message)
            case Removed():
                process.is_removed = True
            case Refused() | Abort() | Finish():
                process.is_over = True
            case BarrierDone(sequence, number):
                self.barrier_done(process, number, sequence)
            case StoreEnded(number) if (store := process.stores.get(number)) is not None:
                assert all(p.stores[number].ending for p in self.participants(number)), "not all wait for the end"
                store.ended = True
            case StoreIsAt(number, barriers, takes_part) if (store := process.stores.get(number)) is not None:
                if not takes_part:
                    store.takes_part, store.done = False, max(store.done, barriers)
                elif not store.takes_part or store.joining:
                    store.takes_part, store.joining = True, False
                    store.reached = max(store.reached, barriers)

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
        process.stores[process.num_opened] = Store()
        process.num_opened += 1
        self.send(process, StoreOpened(process.num_opened - 1))

    def open_again(self, process: Process) -> None:
        opened, stores = process.num_opened, process.stores
        for number in range(opened):
            if number in stores:
                stores[number] = Store()
            self.send(process, StoreOpened(number))
            if number not in stores:
                assert process.rank is not None
                self.send(process, StoreClosed(number, process.rank))

    def adopt_slices(self, process: Process) -> None:
        """A new server recovers the slices that nobody has, and is an empty backup of others."""
        for number, one in enumerate(process.slices):
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
        self.send(process, Barrier(store.reached, number))

    def end(self, process: Process, number: int) -> None:
        store = process.stores[number]
        store.ending, store.takes_part, store.joining = True, True, False
        self.send(process, StoreEnding(number))
