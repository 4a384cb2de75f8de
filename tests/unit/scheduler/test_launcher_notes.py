"""The notes of the scheduler for its launcher."""

from __future__ import annotations

from pathlib import Path

from echelon.cluster.messages import Abort, Departure, Finish, Heartbeat, Member, Roster, View
from echelon.environment import Job
from echelon.scheduler.notes import LauncherNotes


def member(role: str, rank: int, pid: int) -> Member:
    return Member(role, rank, "host", pid, "", f"token of {pid}")


SERVER, FIRST, SECOND = member("server", 0, 10), member("worker", 0, 20), member("worker", 1, 30)
AGAIN = member("worker", 1, 31)


def whole() -> tuple[int, str]:
    return 0, ""


def view(number: int, departure: Departure, *members: Member) -> View:
    workers = [one.rank for one in members if one.role == "worker"]
    return View(number, workers, "why", departure, list(members))


def test_the_launcher_learns_who_was_declared_dead_and_who_is_back(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    notes = LauncherNotes(Job(joined_file=str(path)))
    notes.record(Heartbeat(), whole)
    notes.record(Roster([SERVER, FIRST, SECOND]), whole)
    died = view(2, Departure.DIED, SERVER, FIRST)
    notes.record(died, whole)
    notes.record(died, whole)
    notes.record(view(3, Departure.JOINED, SERVER, FIRST, AGAIN), whole)
    notes.record(view(4, Departure.LEFT, SERVER, AGAIN), whole)
    notes.record(view(5, Departure.DIED, AGAIN), whole)
    notes.record(Finish(), lambda: (3, "the result is not whole:\nworker 0"))
    notes.record(Abort("why"), whole)
    assert path.read_text().splitlines() == [
        "job started",
        "worker 1 lost 30",
        "worker 1 back 31",
        "server 0 lost 10",
        "job over 3 the result is not whole: worker 0",
    ]


def test_a_scheduler_that_was_restarted_does_not_note_the_members_that_it_finds(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    path.touch()
    notes = LauncherNotes(Job(joined_file=str(path)))
    notes.record(view(7, Departure.DIED, SERVER, FIRST), whole)
    assert path.read_text() == ""
    notes.record(view(8, Departure.DIED, SERVER), whole)
    assert path.read_text() == "worker 0 lost 20\n"
