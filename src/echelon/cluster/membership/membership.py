"""The members of a job: registration, joins, returns, views and the end of the job. A pure state machine.

The scheduler's loop calls one method per event; each returns the messages to send. The job is gathering until all
processes have registered, then running, then over. A worker that leaves shrinks the view, and one that joins later
extends it. A server that is lost is replaced by its backup or by a new process; if there is neither, the job fails. No
barrier and no view waits for a process that has left. `tick` ends what waits for time.

A process that loses its connection returns on another one. A scheduler that was started again learns the members of
the job from the processes that return to it (`rebuilding`).

Each layer below owns one part: `members` (connections), `views`, `slice_messages` (servers), `store_messages` (stores
and barriers). This module decides who joins, who leaves, and when the job is over.

A message that its sender must not send, such as a barrier of a store that it has not opened, raises Forbidden and
changes nothing. Messages of a process that has left are ignored, because it may have sent them before.
"""

from __future__ import annotations

from echelon.cluster.membership.leaving import Leavers
from echelon.cluster.membership.members import Send
from echelon.cluster.membership.patience import Patience
from echelon.cluster.membership.rebuilding import Rebuilding
from echelon.cluster.membership.rules import RESTART_S, Rules
from echelon.cluster.membership.slices import first_slices, unstored, with_server
from echelon.cluster.membership.store_messages import StoreMessages
from echelon.cluster.membership.unregistered import Unregistered
from echelon.cluster.messages import (
    SERVER,
    WORKER,
    Abort,
    Departure,
    Finish,
    Forbidden,
    Halt,
    Leave,
    MayLeave,
    Member,
    Refused,
    Register,
    Registered,
    Removed,
    Return,
    Roster,
    ServersUnused,
    View,
    WorkerExited,
)

MAX_REMOVED = 10_000  # processes whose removal is remembered


class Membership(StoreMessages):
    """The state of the scheduler. A connection is a number that the scheduler's loop assigns."""

    def __init__(self, num_workers: int, num_servers: int, rules: Rules | None = None) -> None:
        super().__init__(rules or Rules())
        self._wanted = {WORKER: num_workers, SERVER: num_servers}
        self._requests: dict[int, Register] = {}  # of the processes that registered before the job ran
        self._unregistered = Unregistered(num_workers)
        self._leavers = Leavers()
        self._removed: dict[str, tuple[str, str]] = {}  # token -> the process that was removed, and why
        self._finished: set[str] = set()  # the workers that have finished
        self._late: set[str] = set()  # the tokens of members that joined when the job was running
        self._rebuilding = Rebuilding() if self._rules.is_restarted else None
        self._rebuilds, self._without_workers = Patience(), Patience()
        self.over = False
        self.failure: str | None = None
        self.returned: list[Return] = []  # from which this state was rebuilt, if it was
        self.has_ledger = False  # what a lost worker had to train is trained by others, and workers can be restarted

    # --- what is known

    @property
    def unused(self) -> ServersUnused | None:
        """The first message of a worker whose store has no servers."""
        return self._unregistered.announcement

    @property
    def is_rebuilding(self) -> bool:
        """Whether the scheduler was started again and waits for the members of the job."""
        return self._rebuilding is not None

    @property
    def has_time_limit(self) -> bool:
        """Whether the missing processes must register in time. Workers whose store has no servers need not."""
        return not (self.running or self.over or self.is_rebuilding or self._unregistered.unused)

    def is_used(self, connection: int) -> bool:
        """Whether a connection is a process of the job: a member, or a worker whose store has no servers."""
        returned = self._rebuilding is not None and connection in self._rebuilding
        return connection in self._members or connection in self._unregistered.unused or returned

    def is_leaving(self, rank: int) -> bool:
        """Whether a worker leaves because it was told to end, while others continue."""
        return rank in self._leavers

    def waiting_for(self) -> str:
        """Return the processes that have not registered, for the stall report."""
        parts = []
        for role, count in self._wanted.items():
            here = {m.rank for m in self._members.values() if m.role == role}
            if missing := [str(rank) for rank in range(count) if rank not in here]:
                parts.append(f"{role} {', '.join(missing)}")
        return " and ".join(parts)

    # --- joining

    def register(self, connection: int, request: Register) -> list[Send]:
        """Register a process. A repeated request gets the same answer again, also on another connection."""
        if connection in self._unregistered.unused:
            raise Forbidden("it registers on the connection that announced a store without servers")
        if self.is_rebuilding:
            self._requests[connection] = request
            return []
        if connection not in self._members and (earlier := self.connection_of(request.token)) is not None:
            self._members[connection] = self._members.pop(earlier)
        sends: list[Send] = []
        if (known := self._members.get(connection)) is not None:
            if known.token == request.token:
                return [Send(connection, Registered(known.rank)), *self._roster_for(connection)]
            # An earlier scheduler removed it and told nobody else, so it was a member again when it returned.
            sends = self._remove(connection, Departure.DIED, "it joins the job again")
        refusal = self._refusal(request)
        if refusal is not None:
            return [*sends, Send(connection, Refused(refusal))]
        return sends + self._admit(connection, request)

    def _admit(self, connection: int, request: Register) -> list[Send]:
        taken = {m.rank for m in self._members.values() if m.role == request.role}
        free = (rank for rank in range(self._limit(request.role)) if rank not in taken)
        rank = next(free) if request.rank is None else request.rank
        member = Member(request.role, rank, request.host, request.pid, request.address, request.token)
        self._members[connection] = member
        sends = [Send(connection, Registered(rank))]
        if self.running:
            return sends + self._join_late(connection, member)
        self._requests[connection] = request
        if self.unused is not None and request.role == SERVER:
            sends.append(Send(connection, self.unused))
        if len(self._members) == sum(self._wanted.values()):
            sends += self._start()
        return sends + self._finish_if_all_exited()

    def _start(self) -> list[Send]:
        self.running = True
        self._requests.clear()
        self.slices = first_slices(self._wanted[SERVER], self._rules.replicas)
        self.last_view = View(1, self.workers, "the job started", Departure.JOINED, self.members, self.slices)
        return self.to_all(Roster(self.members, 1, self.slices)) + self._all_barriers_done()

    def _join_late(self, connection: int, member: Member) -> list[Send]:
        """Let a process join the running job. A process that was removed before has returned."""
        was_removed = any(name == str(member) for name, _ in self._removed.values())
        departure = Departure.RETURNED if was_removed else Departure.JOINED
        if was_removed:
            self._trains_itself(member)
        self._late.add(member.token)
        if member.role == WORKER:
            self._stores.late.add(member.rank)
        else:
            self.slices = with_server(self.slices, member.rank, self._rules.replicas)
        views = self._new_view(departure, f"{member} {departure.value}")
        others = [send for send in views if send.to != connection]
        return [*self._roster_for(connection), *others]

    def _roster_for(self, connection: int) -> list[Send]:
        """Return the roster of the running job, and what a new process must know of its stores.

        A process that did not receive the first roster is not late: no barrier is complete without it.
        """
        if self.last_view is None:
            return []
        view, stores = self.last_view, self._stores.progress
        late = self._members[connection].token in self._late
        roster = Roster(view.members, view.number, view.slices, stores, late=late, outcome=self.outcome)
        return [Send(connection, roster), *self._facts_for(connection)]

    def _limit(self, role: str) -> int:
        """Return how many processes of a role the job may have."""
        if role == WORKER and self.running and self._rules.max_workers is not None:
            return max(self._rules.max_workers, self._wanted[WORKER])
        return self._wanted[role]

    def _refusal(self, request: Register) -> str | None:
        if request.role not in self._wanted:
            return f"a process of role {request.role!r} cannot register; only workers and servers can"
        if self.over:
            return f"the job is over: {self.failure or 'all workers have finished'}"
        if (process := str(Member(request.role, request.rank or 0, request.host, request.pid))) in self._finished:
            return f"{process} has left the job"
        if request.role == WORKER and not self.running and self._unregistered.first_exit:
            return self._unregistered.first_exit
        limit = self._limit(request.role)
        same = [m for m in self._members.values() if m.role == request.role]
        if len(same) >= limit:
            more = f"; start the job with a higher --max-workers than {limit}" if request.role == WORKER else ""
            return f"all {limit} {request.role}s have already registered{more if self.running else ''}"
        if request.rank is not None:
            if not 0 <= request.rank < limit:
                return f"{request.role} rank {request.rank} is out of range; the job has {limit} {request.role}s"
            if taken := next((m for m in same if m.rank == request.rank), None):
                return f"{request.role} rank {request.rank} is taken by {taken}"
        return None

    # --- processes that register later, or never

    def servers_unused(self, connection: int, message: ServersUnused) -> list[Send]:
        """Record that a worker has a store without servers. Servers then wait without a time limit."""
        if connection in self._members:
            raise Forbidden("it announces a store without servers on the connection that it registered")
        self._unregistered.announce(connection)
        if self.unused is not None or self.running or self.over:
            return []
        self._unregistered.announcement = message
        return [Send(c, message) for c, m in self._members.items() if m.role == SERVER]

    def worker_exited(self, connection: int, message: WorkerExited) -> list[Send]:
        """Handle the exit of a worker process. If it never registered, the others must not wait for it."""
        if self.is_used(connection):
            raise Forbidden(f"it reports the exit of worker {message.rank}, which only launchers do")
        if message.rank >= (limit := self._limit(WORKER)):
            raise Forbidden(f"it reports the exit of worker {message.rank}, but the job has {limit} workers")
        if self.running or self.over or self.is_rebuilding or message.rank in self.workers:
            return []
        how = self._unregistered.exit(message.rank, message.how)
        if message.failed or self.workers:
            return self.abort(how)
        return self._finish_if_all_exited()

    def _finish_if_all_exited(self) -> list[Send]:
        """End the job if all workers exited without registering, and none failed: they did not use the servers."""
        if self.running or self.over or not self._unregistered.all_have_ended:
            return []
        if len(self._members) < self._wanted[SERVER]:
            return []
        return self._finish()

    # --- returning

    def return_(self, connection: int, report: Return) -> list[Send]:
        """Let a process continue on another connection, or tell it that it was removed.

        To a scheduler that was started again, it says who is in the job.
        """
        if self.over:
            return [Send(connection, Abort(self.failure) if self.failure else Finish())]
        if connection in self._members or connection in self._unregistered.unused:
            raise Forbidden("it returns on a connection that it has used before")
        if not self.running:
            return self._collect(connection, report)
        earlier = self.connection_of(report.member.token)
        if earlier is None:
            _, why = self._removed.get(report.member.token, ("", "this scheduler does not know it"))
            return [Send(connection, Removed(self.view, why))]
        member = self._members[connection] = self._members.pop(earlier)
        assert self.last_view is not None
        sends = [Send(connection, self.last_view)]
        if member.role == WORKER:
            sends += self._restore_stores(member.rank, report)
        elif report.view == self.view:
            sends += self._take_held(connection, report.held)
        return sends + self._facts_for(connection) + self._all_barriers_done()

    def _collect(self, connection: int, report: Return) -> list[Send]:
        """Take the report of a process that returns to a scheduler that was started again."""
        if self._rebuilding is None:
            if self._members:
                why = "another job of this address is about to start, whose processes have registered"
                return [Send(connection, Removed(0, why))]
            self._rebuilding = Rebuilding()
        self._rebuilding.add(connection, report)
        return self._rebuilt() if self._rebuilding.is_complete else []

    def _rebuilt(self) -> list[Send]:
        """Continue the job with the members that have returned, and remove the others."""
        assert self._rebuilding is not None
        rebuilding, self._rebuilding = self._rebuilding, None
        sends: list[Send] = []
        if not rebuilding.is_empty:
            sends = self._adopt(rebuilding)
        requests, self._requests = self._requests, {}
        for connection, request in requests.items():
            sends += self.register(connection, request)
        return sends

    def _adopt(self, rebuilding: Rebuilding) -> list[Send]:
        newest, missing = rebuilding.newest, rebuilding.missing
        self.running = True
        self.returned = list(rebuilding.returned.values())
        self.slices = rebuilding.slices()
        self._num_finished = newest.outcome.num_finished
        self.defects = [] if newest.outcome.not_whole is None else [newest.outcome.not_whole]
        self._members = {connection: report.member for connection, report in rebuilding.returned.items()}
        self._members |= {-number: member for number, member in enumerate(missing, 1)}  # connections of nobody
        self._stores.late.update(self.workers)  # they may have been
        self.last_view = View(newest.view, [], "", Departure.RETURNED)
        why = "it was removed before the scheduler was started again"
        sends = [Send(connection, Removed(newest.view, why)) for connection in rebuilding.removed]
        for report in rebuilding.returned.values():
            if report.member.role == WORKER:
                sends += self._restore_stores(report.member.rank, report)
                self.has_ledger |= any(state.ledger is not None for state in report.stores)
        num_returned = len(rebuilding.returned)
        processes = "1 process" if num_returned == 1 else f"{num_returned} processes"
        sends += self._new_view(Departure.RETURNED, f"the scheduler was started again, and {processes} returned")
        for connection in rebuilding.returned:
            sends += self._facts_for(connection)
        for number in range(1, len(missing) + 1):
            sends += self._remove(-number, Departure.DIED, "it did not return to the scheduler that was started again")
        return sends + (self._all_barriers_done() if not self.over else [])

    # --- leaving

    def leave(self, connection: int, message: Leave) -> list[Send]:
        """Remove a process that announced that it leaves."""
        departure = Departure.FAILED if message.failed else Departure.LEFT
        return self._remove(connection, departure, message.reason)

    def lost(self, connection: int, why: str) -> list[Send]:
        """Remove a process that disappeared without announcing it."""
        self._requests.pop(connection, None)
        if self._rebuilding is not None:
            self._rebuilding.lose(connection)
        if connection in self._unregistered.unused:
            self._unregistered.unused.remove(connection)
            return self._finish_if_all_exited()
        member = self._members.get(connection)
        if member is not None and member.role == WORKER and self._stores.has_closed_all(member.rank):
            return self._remove(connection, Departure.LEFT, "it had closed its stores")
        return self._remove(connection, Departure.DIED, why)

    def leaving(self, connection: int, reason: str) -> list[Send]:
        """Record that a worker was told to end. If all were, all stop; otherwise `tick` lets it leave."""
        rank = self.worker(connection)
        if rank is None:
            return []
        self._leavers.announce(rank, reason)
        return self._halt_if_all_leave()

    def _halt_if_all_leave(self) -> list[Send]:
        reason = self._leavers.reason_if_all(self.workers)
        stores = {number for rank in self.workers for number in self._stores.open_by(rank)}
        if reason is None or not stores:
            return []
        self._leavers = Leavers()  # they end together now
        return [send for number in sorted(stores) for send in self._halt(Halt(reason, number))]

    def _remove(self, connection: int, departure: Departure, why: str) -> list[Send]:
        member = self._members.pop(connection, None)
        if member is None or self.over:
            return []
        self._late.discard(member.token)
        if not self.running:
            return self.abort(f"{member} {departure.value} before the job started: {why}")
        reason = f"{member} {departure.value}: {why}"
        self._removed[member.token] = str(member), reason
        while len(self._removed) > MAX_REMOVED:
            del self._removed[next(iter(self._removed))]
        if member.role == SERVER:
            sends = self._continue_without_server(member.rank, reason) if departure is Departure.DIED else None
            return self.abort(reason) if sends is None else sends
        if departure is Departure.LEFT:
            self._finished.add(str(member))
        return self._remove_worker(member.rank, departure, reason)

    def _remove_worker(self, rank: int, departure: Departure, reason: str) -> list[Send]:
        has_finished = departure is Departure.LEFT and rank not in self._leavers
        self._num_finished += has_finished
        if not has_finished and not self.has_ledger:
            self._add_untrained(reason)
        self._stores.remove(rank)
        self._leavers.remove(rank)
        sends = self._new_view(departure, reason) + self._all_barriers_done() + self._halt_if_all_leave()
        if not self._lacks_workers:
            return sends if self.workers else sends + self._finish()
        has_values = bool(self.workers) or not unstored(self.slices)
        if self._rules.can_restart and self.has_ledger and departure is not Departure.LEFT and has_values:
            return sends  # `tick` waits for new workers
        return sends + self._stop_without_workers(reason)

    @property
    def _lacks_workers(self) -> bool:
        return len(self.workers) + self._num_finished < self._rules.min_workers

    def _stop_without_workers(self, reason: str) -> list[Send]:
        left, needed = len(self.workers), self._rules.min_workers
        are_left = "1 worker is" if left == 1 else f"{left} workers are"
        failure = f"{are_left} left, and the job needs {needed} (--min-workers): {reason}"
        if left:
            return self.abort(failure)
        self.failure = failure
        return self._finish()  # servers have nothing to report

    # --- what waits for time

    def tick(self, now: float) -> list[Send]:
        """End the waits that have lasted too long. `now` does not count the time in which the scheduler was stopped."""
        if self.over:
            return []
        if self._rebuilds.lasted_s(now, self.is_rebuilding) > self._rules.return_s:
            return self._rebuilt()
        if not self.running:
            return []
        workers = self.worker_connections()
        sends = [Send(workers[rank], MayLeave()) for rank in self._leavers.due(now)]
        if (lost := self._lost_servers(now)) is not None:
            return sends + self.abort(lost)
        if self._without_workers.lasted_s(now, self._lacks_workers) > RESTART_S:
            reason = f"no worker joined within {RESTART_S:g} s"
            return sends + self._stop_without_workers(reason)
        return sends + self._replace_backups(now)

    # --- the end

    def _finish(self) -> list[Send]:
        self.over = True
        return self.to_all(Finish())

    def abort(self, reason: str) -> list[Send]:
        """End the job because it has failed."""
        self.over, self.failure = True, reason
        # Servers that nobody uses did not fail, and have nothing to report.
        return self.to_all(Finish() if self.unused and not self.running else Abort(reason))
