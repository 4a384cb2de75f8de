"""Running the processes of a job: start them, label their output, forward signals, leave none behind.

The processes may run anywhere (`processes.RunningProcess`). One thread runs one loop. A job with servers survives the
death of a worker. Processes that failed are started again if the job can replace them (`restarts`). Workers may
continue after the servers have ended, for example to evaluate, but an idle one is killed. Ctrl-C and SIGTERM are
forwarded to the workers, which get time to save a checkpoint; a second one kills everything at once. The exit status
says whether the result is whole (`verdict`).
"""

from __future__ import annotations

import math
import os
import selectors
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence

from echelon.errors import NOT_WHOLE, EchelonError
from echelon.launch.supervision.children import Child, Command, OnEnd, OnLine, Start, print_line, start_child
from echelon.launch.supervision.explain import ended_before, why_failed
from echelon.launch.supervision.last_lines import LastLines
from echelon.launch.supervision.restarts import NoRestarts, Restarter
from echelon.launch.supervision.signals import collected_signals
from echelon.launch.supervision.verdict import (
    Failure,
    Loss,
    Verdict,
    describe_losses,
    final_status,
    has_no_verdict,
    stop_reason,
)

GRACE_S = 5.0  # to end, for processes that are stopped because another one failed
SAVING_S = 30.0  # to end, for workers that get a signal: enough for a step and a checkpoint, as in Slurm and Kubernetes
ABANDONED_S = 2.0  # to end, for servers and the scheduler of a job that was stopped or failed: nothing is lost
RESTARTED_S = 30.0  # to end, for a scheduler that was restarted after the last worker has ended
IDLE_S = 60.0  # without CPU time, for workers after the servers have ended: they may wait for a slow disk, not forever
JUDGED_S = 2.0  # after its end the scheduler's verdict still covers losses, because ends on other machines arrive late
TICK_S = 0.2
ENDED_WITH_JOB = "did not return to the job, and was ended with it"  # of a worker that was declared dead
READS_AT_ONCE = 8  # of a process that prints faster than its lines are shown


class Supervisor:
    """Starts commands and runs until all of them have ended."""

    def __init__(
        self,
        on_line: OnLine = print_line,
        on_tick: Callable[[], None] = lambda: None,
        on_end: OnEnd = lambda name, how, failed: None,
        start: Start = start_child,
        *,
        needed_elsewhere: Callable[[], bool] = lambda: False,
        has_ledger: Callable[[], bool] = lambda: False,
        restarter: Restarter | None = None,
        verdict: Callable[[], Verdict | None] = lambda: None,
    ) -> None:
        self._start_process = start
        self._needed_elsewhere = needed_elsewhere  # whether workers of other launchers need the servers of this one
        self._has_ledger = has_ledger  # whether others train the samples of a worker that failed
        self._restarter = restarter or NoRestarts()
        self._verdict = verdict  # what the scheduler has noted, if the job is over
        self._output = LastLines(on_line)
        self._on_tick = on_tick
        self._on_end = on_end
        self._children: list[Child] = []
        self._selector = selectors.DefaultSelector()
        self._status = 0
        self._reason = ""
        self._cause: Child | None = None  # the process that the reason names
        self._decisive = False  # the job has failed, whatever the scheduler says
        self._failed: Child | None = None  # the first process that failed by itself
        self._uncovered = False  # a worker failed whose samples nobody has trained
        self._losses: list[Loss] = []
        self._lost: set[str] = set()  # the processes that the scheduler has declared dead
        self._judged_at = math.inf  # when the scheduler ended
        self._deadline = math.inf
        self._cpu_ticks, self._last_active = 0, math.inf  # of the workers, since the servers have ended
        self._stopping = False
        self._interrupted = False
        self._signals: deque[int] = deque()

    def run(self, commands: Sequence[Command]) -> int:
        """Run to the end. Return 0 or the first failing exit status, which is 128 + signal for a killed process."""
        with collected_signals() as self._signals:
            try:
                for command in commands:
                    self._start(command)
                while not all(child.ended for child in self._children):
                    self._turn()
                self._read_remaining_output()
            except BrokenPipeError:
                self._handle_closed_output()
            finally:
                self._kill_all()
        return self._conclude()

    def _conclude(self) -> int:
        """Say what has become of the job, and return its exit status."""
        judge = next((child for child in self._children if child.command.judge), None)
        judged = self._judged(judge) if judge else None
        workers = [child.process.reap() for child in self._children if not child.command.essential]
        first = Failure(self._status, self._decisive, self._uncovered) if self._status else None
        status = final_status(first, judged, workers)
        losses, why = describe_losses(self._losses), why_failed(self._failed, self._output)
        if judge and judged == NOT_WHOLE and not self._decisive:
            noted = self._verdict()
            text = (noted.why if noted else "") or judge.last_line or "the result is not whole"
            why = "" if self._failed is judge else why  # its last line is this text
            text += f" ({losses}{why})" if losses else ""
        elif status == NOT_WHOLE and judged is not None and has_no_verdict(judged) and not self._decisive:
            text = f"it is not known whether the result is whole, because {losses}{why}"
        elif status:
            text = f"{self._reason}{self._why_stopped(judge)}{why}{ended_before(self._failed, self._children)}"
        else:
            text = f"the result is whole, although {losses}" if losses else ""
        if text:
            _say(text)
        return status

    def _judged(self, judge: Child) -> int:
        """Return the verdict of the scheduler, which has ended. If it was killed, that is what it has noted before."""
        code, noted = judge.process.reap(), self._verdict()
        return noted.status if noted is not None and has_no_verdict(code) else code

    def _why_stopped(self, judge: Child | None) -> str:
        """Return why the scheduler has stopped the job after the loss of a worker."""
        if judge is None or self._interrupted or self._cause is None or self._cause.command.essential:
            return ""
        noted, printed = self._verdict(), judge.last_line if judge.process.reap() == 1 else ""
        why = stop_reason(noted.why if noted and noted.status == 1 else printed, self._cause.name)
        return f"; {why}" if why else ""

    def watch(self, fileno: int, on_readable: Callable[[], None]) -> None:
        """Call a function whenever a file of the launcher is readable."""
        self._selector.register(fileno, selectors.EVENT_READ, on_readable)

    def _start(self, command: Command) -> None:
        self._children.append(Child(command, self._start_process(command)))

    def _turn(self) -> None:
        self._on_tick()
        if self._judged_at < math.inf:  # the notes of the scheduler have been read, so it is known who has joined
            self._end_unjoined_workers()
        self._watch_new_outputs()
        for key, _ in self._selector.select(TICK_S):
            self._read(key.data) if isinstance(key.data, Child) else key.data()
        while self._signals:
            self._forward_signal(self._signals.popleft())
        ended = self._ended()
        for child in sorted(ended, key=self._cause_first):
            self._handle_end(child)
        self._restart_those_due(time.monotonic())
        self._output.release_overdue(time.monotonic())
        if ended and self._is_finishing():
            abandoned = self._decisive or (self._status and not self._has_finished_worker())
            abandoned = abandoned or self._scheduler_has_finished()
            self._limit_time(ABANDONED_S if abandoned else 2 * GRACE_S)
        if self._only_workers_left():
            self._check_for_idle_workers(time.monotonic())
            self._kill_lost_workers()
        if time.monotonic() >= self._deadline:
            self._kill_late_children()

    def _watch_new_outputs(self) -> None:
        """Begin to read the output of processes; that of a process elsewhere is known when its host answers."""
        for child in self._children:
            if child.output_fd is None and child.output_ended == math.inf:
                child.output_fd = child.process.fileno()
                if child.output_fd is not None:
                    self._selector.register(child.output_fd, selectors.EVENT_READ, child)

    def _ended(self) -> list[Child]:
        """Return the processes whose end can be handled: all that ended, but those whose cause has not ended yet."""
        left = [child for child in self._children if not (child.ended or child.restart)]
        ended = [child for child in left if not child.is_running]
        running, now = [child.name for child in left if child not in ended], time.monotonic()
        return [child for child in ended if not self._output.waits_for_cause(child.name, running, now)]

    def _cause_first(self, child: Child) -> tuple[bool, float]:
        """Sort key for processes that ended in the same turn: a killed one, then the first to fail, is the cause."""
        began = self._output.since(child.name)
        return child.process.reap() >= 0, child.output_ended if began is None else began

    def _handle_end(self, child: Child) -> None:
        code = child.process.reap()
        self._read(child)
        how = self._how_ended(child)
        if code and self._restart_later(child, code, how):
            return
        child.ended = True
        if child.command.judge:
            self._judged_at = time.monotonic()
        is_cause = bool(code) and not self._status
        failed = child.replaces if child.killed else None  # its place is empty, but it has not failed itself
        if is_cause:
            self._record_cause(failed or child)
        self._output.release(child.name, is_cause=is_cause)
        if code and failed is None:
            self._handle_failure(child, code, how)
        self._on_end(child.name, how, code != 0)

    def _how_ended(self, child: Child) -> str:
        """Say how a process ended. The loss of a host is often known only after its worker was ended with the job."""
        by_launcher = child.killed and child.process.reap() == -signal.SIGKILL
        return ENDED_WITH_JOB if by_launcher and child.name in self._lost else child.process.how_ended()

    def _record_cause(self, child: Child) -> None:
        """Record the first failure. A process that failed before, and has not been restarted yet, is its cause."""
        child = next((other for other in self._children if other.restart), child)
        code, how = child.process.reap(), self._how_ended(child)
        self._fail(128 - code if code < 0 else code, child, how)
        self._failed = child if code > 0 else None
        self._note_those_that_ended_before()
        is_fatal = child.command.needed or (child.command.essential and not self._is_over())
        if code < 0 and is_fatal:
            self._output.take(child.name, how, time.monotonic())  # it left no line; those of the others follow

    def _handle_failure(self, child: Child, code: int, how: str) -> None:
        """Decide what the end of a process that failed, and is not restarted, means for the others."""
        if self._stopping:
            return
        command = child.command
        if command.judge and code == NOT_WHOLE:
            return  # the workers may still evaluate
        self._losses.append(Loss(child.who, how, restarted=False))
        self._uncovered |= not (command.essential or self._has_ledger())
        fatal = command.needed or (command.essential and not (command.replicated or self._is_over()))
        if command.judge:
            judged = self._judged(child)
            fatal |= not (judged in (0, NOT_WHOLE) or has_no_verdict(judged))
        if fatal or self._restarter.ends_job(child.name):
            self._decisive = True
            self._stop(signal.SIGTERM, self._children, GRACE_S)
        elif not command.essential and time.monotonic() - self._judged_at > JUDGED_S and child.name not in self._lost:
            self._decisive = True  # the scheduler has not seen this one

    def _restart_later(self, child: Child, code: int, how: str) -> bool:
        """Return whether a process that failed is started again, and say so."""
        if self._stopping or child.killed or (self._is_finishing() and not child.command.judge):
            return False
        child.restart = self._restarter.plan(child.name, code, time.monotonic())
        if child.restart is None:
            return False
        self._output.release(child.name, is_cause=True)
        self._losses.append(Loss(child.who, how, restarted=True))
        wait_s = child.restart.at - time.monotonic()
        _say(f"{child.who} {how}; restart {child.restart.number} of {child.restart.most} in {wait_s:.1f} s")
        return True

    def _restart_those_due(self, now: float) -> None:
        for index, child in enumerate(self._children):
            if child.restart is None or child.restart.at > now:
                continue
            self._read(child)
            if child.output_fd is not None and child.output_ended == math.inf:  # what it started has escaped
                self._selector.unregister(child.output_fd)
            try:
                process = self._restarter.start(child.name, child.restart.number)
            except (EchelonError, OSError) as error:
                child.restart, child.ended = None, True
                self.fail(child.name, f"cannot be restarted: {error}")
                continue
            child.process.close()
            self._children[index] = Child(child.command, process, lines=child.lines, replaces=child)
            if self._is_finishing() and not self._stopping:
                self._deadline = now + RESTARTED_S

    def _end_unjoined_workers(self) -> None:
        """End workers that are restarted and have not joined: the scheduler has ended, so they cannot."""
        late = [child for child in self._children if not (child.command.essential or child.ended or child.killed)]
        self._give_up_restarts(late)
        for child in late:
            if child.replaces is not None and not child.ended:
                self._kill(child)

    def _give_up_restarts(self, children: Sequence[Child]) -> None:
        for child in children:
            if child.restart is None:
                continue
            if not self._status:
                self._record_cause(child)
            child.restart, child.ended = None, True
            self._losses = [one._replace(restarted=False) if one.who == child.who else one for one in self._losses]
            self._on_end(child.name, child.process.how_ended(), True)

    def _note_those_that_ended_before(self) -> None:
        for other in self._children:
            other.ended_before_failure = other.ended and not other.command.essential and other.process.reap() == 0

    def fail(self, name: str, why: str) -> None:
        """End the job, because the named process ended in a way that the others cannot continue after."""
        child = next(child for child in self._children if child.name == name)
        if not self._status:
            self._fail(1, child, why)
            self._decisive = True
            self._stop(signal.SIGTERM, self._children, GRACE_S)

    def set_lost(self, name: str, pid: int | None) -> None:
        """Record that the scheduler has declared the process `pid` dead, or with None that it has returned or joined.

        A server cannot return: it is killed, so that it can be restarted. A worker can, until the job has ended.
        """
        (self._lost.discard if pid is None else self._lost.add)(name)
        for child in [child for child in self._children if child.name == name]:
            if pid is None:
                child.replaces = None
            elif child.command.essential and child.process.where.split()[:2] == ["pid", str(pid)]:
                child.process.send_signal(signal.SIGKILL)  # this one, and not the next process of that name

    def _fail(self, status: int, child: Child, how: str) -> None:
        self._status, self._cause = status, child
        self._reason = f"{child.who} {how}"

    def _kill_late_children(self) -> None:
        for child in self._children:
            if child.ended or child.killed or child.restart:
                continue
            idle = not (child.command.essential or self._stopping) and self._last_active < math.inf
            if not self._decisive and idle:
                self._fail(1, child, f"used no CPU time for {IDLE_S:g} s after the servers had ended, and was killed")
                self._decisive = True
            elif not self._status and not self._scheduler_has_finished():
                self._fail(1, child, f"had not ended {2 * GRACE_S:g} s after the last worker")
                self._decisive = True
            elif idle or (self._interrupted and not child.command.essential):
                self._reason += f"; {child.who} had not ended and was killed"
            self._kill(child)

    def _kill(self, child: Child) -> None:
        child.process.send_signal(signal.SIGKILL)
        child.killed = True

    def _only_essentials_left(self) -> bool:
        return all(child.ended for child in self._children if not child.command.essential)

    def _is_finishing(self) -> bool:
        """Whether only servers and scheduler are left, and no worker elsewhere needs them."""
        return self._only_essentials_left() and (self._stopping or not self._needed_elsewhere())

    def _is_over(self) -> bool:
        """Whether no worker needs the servers and the scheduler any more, although some may still evaluate."""
        return self._is_finishing() or self._verdict() is not None

    def _scheduler_has_finished(self) -> bool:
        """Whether the scheduler says that the job is over. A server that was being restarted then finds nobody."""
        scheduler = next((child for child in self._children if child.command.judge), None)
        return scheduler is not None and scheduler.ended and self._judged(scheduler) == 0

    def _has_finished_worker(self) -> bool:
        return any(child.ended and not (child.command.essential or child.process.reap()) for child in self._children)

    def _kill_lost_workers(self) -> None:
        """Kill workers that are stopped or cut off, when no other process of the job is left."""
        left = [child for child in self._children if not (child.ended or child.killed)]
        if all(child.name in self._lost for child in left):
            for child in left:
                self._kill(child)

    def _only_workers_left(self) -> bool:
        servers = [child.ended for child in self._children if child.command.essential]
        return bool(servers) and all(servers)

    def _check_for_idle_workers(self, now: float) -> None:
        """After the servers have ended, a worker may still evaluate or write; a stopped one would never end."""
        ticks = sum(child.process.cpu_ticks() for child in self._children if not child.ended)
        if ticks != self._cpu_ticks or self._last_active == math.inf:
            self._cpu_ticks, self._last_active = ticks, now
        elif now - self._last_active >= IDLE_S:
            self._limit_time(0.0)

    def _stop(self, number: int, children: Sequence[Child], within_s: float) -> None:
        self._stopping = True
        self._give_up_restarts(self._children)
        self._limit_time(within_s)
        for child in children:
            child.process.send_signal(number)

    def _limit_time(self, seconds: float) -> None:
        self._deadline = min(self._deadline, time.monotonic() + seconds)

    def _forward_signal(self, number: int) -> None:
        """Send the signal to the workers, which may save a checkpoint. The servers end when the workers have ended."""
        name = signal.Signals(number).name
        if self._interrupted:
            self._reason += f", and again by {name}"
            self._limit_time(0.0)
            return
        self._interrupted = self._decisive = True
        self._status = self._status or 128 + number
        self._reason = self._reason or f"stopped by {name}"
        self._stop(number, [child for child in self._children if not child.command.essential], SAVING_S)

    def _read(self, child: Child) -> None:
        """Take output of a process that has arrived, but not more at once than leaves time for signals."""
        for _ in range(READS_AT_ONCE):
            if child.output_ended < math.inf or (data := child.process.read_output()) is None:
                return
            if not data:
                if child.output_fd is not None:
                    self._selector.unregister(child.output_fd)
                child.output_ended = time.monotonic()
                data = b"\n" if child.partial else b""
            self._take(child, data)

    def _take(self, child: Child, data: bytes) -> None:
        for text in child.split_lines(data):
            if not child.command.hidden:
                self._output.take(child.name, text, time.monotonic())

    def _handle_closed_output(self) -> None:
        """Nobody reads this process's output any more, as after `… | head -1`: end everything and print nothing."""
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        self._status, self._decisive = 128 + signal.SIGPIPE, True
        self._reason = "stopped, because nobody reads its output any more"

    def _read_remaining_output(self) -> None:
        deadline = time.monotonic() + 1.0
        while any(c.output_ended == math.inf for c in self._children) and time.monotonic() < deadline:
            for key, _ in self._selector.select(0.05):
                self._read(key.data) if isinstance(key.data, Child) else key.data()
        self._output.release_overdue(math.inf)
        self._on_tick()

    def _kill_all(self) -> None:
        for child in self._children:  # all at once: each end on another machine takes time to be confirmed
            if child.is_running:
                child.process.send_signal(signal.SIGKILL)
        for child in self._children:
            child.process.close()
        self._selector.close()


def _say(text: str) -> None:
    print(f"echelon: {text}", file=sys.stderr, flush=True)
