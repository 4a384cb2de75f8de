"""The checker of histories: it accepts good ones, and finds every kind of error that is put into them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from echelon.observe.events import EventLog
from echelon.observe.history import ShardHistory, WorkerHistory, as_ranges, from_ranges
from echelon.schemes import Engine, rules_for
from echelon.testing.history import (
    BOUND,
    DIFFERS,
    GAP,
    LOST,
    MISSED,
    REPEATED,
    TWICE,
    UNNAMED,
    Report,
    check,
    check_events,
)

SAMPLES, BATCH, EPOCHS = 16, 4, 2
SLICES = {0: "0-1", 1: "2"}  # the keys of each slice
Events = list[dict[str, Any]]


class Job:
    """Writes the history of a job of two workers under dist_ssync, each alone in its group, with a bound of 1."""

    def __init__(self, *, replicas: bool = False) -> None:
        self.events: Events = []
        self.primaries = {0: ("server 0", 100), 1: ("server 1", 101)}
        self.backups = {0: ("server 1", 101), 1: ("server 0", 100)} if replicas else {}
        self.versions = dict.fromkeys(SLICES, 0)
        self.clocks = {0: 0, 1: 0}
        for number in SLICES:
            for who, copied in self._writers(number):
                self._write(who, "history_store", number, copied, scheme="dist_ssync", bound=1, groups={})
                self._write(who, "history", number, copied, active=[[0, 0], [1, 1]])

    def _writers(self, number: int) -> list[tuple[tuple[str, int], bool]]:
        return [(self.primaries[number], False), *([(self.backups[number], True)] if number in self.backups else [])]

    def _write(self, who: tuple[str, int], kind: str, number: int, copied: bool, **fields: Any) -> None:
        place = {"store": 0, "slice": number, "pid": who[1], "copy": copied}
        self.events.append({"at": float(len(self.events)), "who": who[0], "event": kind, **place, **fields})

    def step(
        self, worker: int, work: list[int] | None, *, slices: tuple[int, ...] = (0, 1), acked: bool = True
    ) -> None:
        """A worker pushes, the servers update and answer, and the worker learns that."""
        clock = self.clocks[worker]
        self.clocks[worker] += 1
        works = [] if work is None else [work]
        for number in slices:
            self.versions[number] += 1
            keys = SLICES[number]
            ahead = clock + 1 - min([*self.clocks.values(), clock + 1])
            for who, copied in self._writers(number):
                answers = {} if copied else {"answers": [[keys, worker, clock + 1, ahead]]}
                update = [keys, clock, self.versions[number], [[worker, works]]]
                self._write(who, "history", number, copied, updates=[update], **answers)
        if acked:
            pushes = [[number, SLICES[number], clock, works] for number in slices]
            self.events.append(
                {"at": 0.0, "who": f"worker {worker}", "event": "history_acked", "store": 0, "pushes": pushes}
            )

    def lose(self, worker: int) -> None:
        """A worker is lost, and nobody waits for it."""
        del self.clocks[worker]
        for number in SLICES:
            for who, copied in self._writers(number):
                self._write(who, "history", number, copied, active=[[left, left] for left in self.clocks])

    def train(self, *epochs: int) -> None:
        """Train epochs; the workers take turns."""
        for epoch in epochs:
            for number, start in enumerate(range(0, SAMPLES, BATCH)):
                self.step(number % 2, [0, epoch, start, start + BATCH])

    def promote(self, number: int) -> None:
        """The primary of a slice is lost, and its backup continues."""
        self.primaries[number] = self.backups.pop(number)
        self._write(self.primaries[number], "history_role", number, False)


def good(*, replicas: bool = False, failover: bool = False) -> Events:
    job = Job(replicas=replicas)
    job.train(0)
    if failover:
        job.promote(1)
    job.train(1)
    return job.events


def checked(events: Events, **more: Any) -> Report:
    return check_events(events, num_samples=SAMPLES, **more)


@pytest.mark.parametrize(("replicas", "failover"), [(False, False), (True, False), (True, True)])
def test_a_good_history_has_no_problems(replicas: bool, failover: bool) -> None:
    report = checked(good(replicas=replicas, failover=failover))
    assert report.problems == []
    assert (report.acked, report.updates, report.steps, report.partial_steps) == (24, 24, 8, 0)
    assert (report.epochs, report.answers) == (EPOCHS, 16)
    assert report.longest_pause_s > 0


def test_pauses_are_those_between_updates_of_originals() -> None:
    report = Report(update_times=[1.0, 2.0, 5.0, 5.5])
    assert report.pause_between() == 3.0
    assert report.pause_between(5.2, 5.3) == 0.5
    assert report.pause_between(6.0, 7.0) == 0.0
    assert report.pause_between(others=[3.0]) == 1.0


def updates_of(events: Events, number: int, who: str = "") -> list[dict[str, Any]]:
    return [
        event
        for event in events
        if event["event"] == "history" and event.get("updates") and event["slice"] == number and who in event["who"]
    ]


@pytest.mark.parametrize("at", [2, -1], ids=["early", "last"])
def test_an_update_that_the_next_server_names_as_applied_in_part_is_counted_and_no_problem(at: int) -> None:
    """The server died before it recorded the update. Its worker was told by the next one that it is applied."""
    events = good()
    lost = updates_of(events, 1)[at]
    ((keys, clock, version, ((worker, _),)),) = lost.pop("updates")
    assert {problem.kind for problem in checked(events).problems} >= {LOST}
    rebuilt = {"event": "history_rebuilt", "in_part": [[keys, version, [[worker, clock, clock + 1]]]]}
    events.insert(events.index(lost) + 1, lost | rebuilt)
    report = checked(events)
    assert (report.problems, report.updates_in_part, report.steps, report.partial_steps) == ([], 1, 8, 0)
    rebuilt["in_part"] = [[keys, version, [[1 - worker, clock, clock + 1]]]]
    events[events.index(lost) + 1].update(rebuilt)
    assert LOST in {problem.kind for problem in checked(events).problems}, "only the push that was named is excused"


def lose_an_update(events: Events) -> None:
    del updates_of(events, 1)[-1]["updates"]


def lose_an_early_update(events: Events) -> None:
    del updates_of(events, 1)[2]["updates"]


def apply_twice(events: Events) -> None:
    last = updates_of(events, 0)[-1]
    keys, clock, version, parts = last["updates"][0]
    last["updates"].append([keys, clock, version + 1, parts])


def make_a_version_twice(events: Events) -> None:
    last = updates_of(events, 0)[-1]
    last["updates"].append(list(last["updates"][0]))


def exceed_the_reported_bound(events: Events) -> None:
    updates_of(events, 0)[4]["answers"][0][3] = 2


def exceed_the_bound_of_the_clocks(events: Events) -> None:
    updates_of(events, 0)[4]["answers"][0][2] += 5


def skip_samples(events: Events) -> None:
    change_work(events, [0, 1, 4, 8], [0, 1, 4, 7])


def skip_the_last_samples(events: Events) -> None:
    change_work(events, [0, 0, 12, 16], [0, 0, 12, 15])


def repeat_samples(events: Events) -> None:
    change_work(events, [0, 1, 4, 8], [0, 1, 3, 8])


def train_an_epoch_again(events: Events) -> None:
    change_work(events, [0, 1, 4, 8], [0, 0, 4, 8])


def change_work(events: Events, old: list[int], new: list[int]) -> None:
    for event in events:
        for update in event.get("updates", ()):
            for part in update[3]:
                part[1] = [new if work == old else work for work in part[1]]


@pytest.mark.parametrize(
    ("corrupt", "kinds"),
    [
        (lose_an_update, {LOST, MISSED}),
        (lose_an_early_update, {LOST, GAP, MISSED}),
        (apply_twice, {TWICE}),
        (make_a_version_twice, {TWICE}),
        (exceed_the_reported_bound, {BOUND}),
        (exceed_the_bound_of_the_clocks, {BOUND}),
        (skip_samples, {MISSED}),
        (skip_the_last_samples, {MISSED}),
        (repeat_samples, {REPEATED}),
        (train_an_epoch_again, {MISSED, REPEATED}),
    ],
)
def test_every_kind_of_error_is_found(corrupt: Callable[[Events], None], kinds: set[str]) -> None:
    events = copy.deepcopy(good())
    corrupt(events)
    assert {problem.kind for problem in checked(events).problems} == kinds


def test_a_gradient_without_samples_is_an_error_only_where_all_have_some() -> None:
    job = Job()
    job.train(0)
    assert checked(job.events, all_named=True).problems == []
    job.step(0, None)
    job.step(1, None)
    job.train(1)
    assert checked(job.events).problems == [], "a program may make other steps, too"
    problems = checked(job.events, all_named=True).problems
    assert [problem.kind for problem in problems] == [UNNAMED] * 6, "one for each key and worker"
    assert "worker 0, clock 2" in problems[0].text


def test_a_group_may_skip_rounds_when_its_members_change() -> None:
    """Its other member pauses, and the one that joined begins at a later clock: nobody has to push the round before."""
    place = {"at": 0.0, "who": "server 0", "store": 0, "slice": 0, "pid": 1, "copy": False}
    events = [
        {"event": "history_store", "bound": 1, **place},
        {"event": "history", "active": [[0, 0], [2, 1]], **place},
        {"event": "history", "updates": [["0", 4, 1, [[0, []]]]], "answers": [["0", 0, 5, 0]], **place},
        {"event": "history", "updates": [["0", 6, 2, [[2, []]]]], **place},  # its pull at clock 7 is held
        {"event": "history", "active": [[1, 0], [2, 1]], "answers": [["0", 2, 7, 1], ["0", 1, 6, 0]], **place},
    ]
    assert check_events(events).count(BOUND) == 0
    too_early = {"event": "history", "answers": [["0", 2, 7, 1]], **place}
    assert check_events([*events[:4], too_early]).count(BOUND) == 1


def test_the_epoch_in_which_a_run_stops_need_not_be_complete() -> None:
    job = Job()
    job.train(0)
    job.step(0, [0, 1, 4, 8])
    assert checked(job.events, ended=False).problems == []
    assert {problem.kind for problem in checked(job.events).problems} == {MISSED}


def test_a_partial_step_is_counted_and_its_samples_have_to_be_trained_again() -> None:
    job = Job()
    job.train(0)
    job.step(0, [0, 1, 0, 4], slices=(0,), acked=False)
    partial = copy.deepcopy(job.events)
    job.lose(0)
    job.step(1, [0, 1, 0, 4])
    job.step(1, [0, 1, 4, 16])
    report = checked(job.events)
    assert (report.problems, report.partial_steps) == ([], 1)
    assert checked(partial, ended=False).problems == []


def test_a_backup_that_does_something_else_is_found() -> None:
    events = copy.deepcopy(good(replicas=True))
    updates_of(events, 1, "server 0")[0]["updates"][0][1] = 99
    assert {problem.kind for problem in checked(events).problems} == {DIFFERS}


@pytest.mark.parametrize("promoted", [False, True])
def test_a_backup_with_other_weights_is_found_also_after_it_was_promoted(promoted: bool) -> None:
    events = copy.deepcopy(good(replicas=True, failover=promoted))
    for event in events:
        for update in event.get("updates", ()):
            update.append(update[2])  # a digest of the weights
    assert checked(events).problems == []
    updates_of(events, 1, "server 0")[0]["updates"][0][4] = 99
    assert {problem.kind for problem in checked(events).problems} == {DIFFERS}


def test_what_only_the_lost_primary_had_applied_is_lost() -> None:
    job = Job(replicas=True)
    job.train(0)
    del updates_of(job.events, 1, "server 0")[-1]["updates"]  # the backup has not received the last update
    job.promote(1)
    report = checked(job.events)
    assert {problem.kind for problem in report.problems} == {LOST, MISSED}


def test_an_update_that_nobody_was_told_of_may_be_lost_with_its_server() -> None:
    job = Job(replicas=True)
    job.train(0)
    job.step(0, [0, 1, 0, 4], acked=False)
    del updates_of(job.events, 1, "server 0")[-1]["updates"]
    job.promote(1)
    job.versions[1] -= 1
    job.clocks[0] -= 1
    job.step(0, [0, 1, 0, 4], slices=(1,))  # which its worker sends again
    report = checked(job.events, ended=False)
    assert (report.problems, report.partial_steps) == ([], 0)


@pytest.mark.parametrize(
    ("keys", "text"), [((), ""), ((3,), "3"), ((0, 1, 2), "0-2"), ((7, 0, 1), "0-1,7"), ((2, 4, 5, 9), "2,4-5,9")]
)
def test_keys_are_written_as_ranges(keys: tuple[int, ...], text: str) -> None:
    assert as_ranges(keys) == text
    assert from_ranges(text) == tuple(sorted(keys))


def test_events_are_in_the_file_before_the_call_returns(tmp_path: Path) -> None:
    with EventLog(tmp_path, "server", 0) as log:
        history = ShardHistory(log, 0, 0, is_copy=False)
        engine = Engine(rules_for("dist_sync", None, None, "share"), [0])
        engine.add_key(0)
        history.begin(engine)
        action = engine.push(0, 0, 0, 1.0).actions[0]
        history.updated([0], action, [[]])  # type: ignore[arg-type]
        history.flush(engine, [])
        report = check(tmp_path)
        assert (report.updates, report.problems) == (1, [])
        WorkerHistory(log, 0).flush()
        assert check(tmp_path) == report, "nothing was acknowledged, so nothing is written"
