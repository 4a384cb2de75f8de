"""How a scheduler that was started again rebuilds a ledger from what the living processes report.

Workers report their latest leases and the newest state that they have seen; servers report which positions they have
applied. A position is done if a worker knows it as done, or if all slices have applied it and no living worker has it
in a lease: a worker that has left trained it. A position that only some slices have applied, and that no living worker
has, was half pushed by a worker that has left: it is counted as partial and trained again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from echelon.cluster.ledger.axis import Axis
from echelon.cluster.ledger.intervals import Interval, IntervalSet
from echelon.cluster.ledger.ledger import Ledger, ToWorker
from echelon.cluster.messages import HeldLedger, SliceWork


def rebuild(
    held: Mapping[int, HeldLedger],
    slices: Mapping[int, Sequence[SliceWork]],
    num_slices: int,
    expected: Iterable[int],
    missing: Mapping[int, int],
) -> tuple[Ledger, list[ToWorker]]:
    """Return the ledger and the messages to send.

    held      the reports of the living workers, by rank
    slices    the reports of the slices, each about some epochs; a slice may be missing
    missing   workers that did not return, and the view in which they left: the servers have yet to settle them
    """
    opened = next(iter(held.values())).opened
    axis = Axis(opened.num_samples)
    ledger = Ledger(opened, num_slices, set(expected) - held.keys())
    epoch = max(report.epoch for report in held.values())
    leases = {rank: [lease for lease in report.leases if lease.epoch >= epoch] for rank, report in held.items()}
    known, leased = IntervalSet(), IntervalSet()
    for report in held.values():
        _add(known, axis.points(report.epoch, report.done))
    for lease in (lease for found in leases.values() for lease in found):
        _add(known, axis.points(lease.epoch, lease.batches[: lease.trained]))
        _add(leased, axis.points(lease.epoch, lease.batches[lease.trained :]))
    _add(known, axis.points(opened.epoch, opened.done))
    known.remove(*axis.epochs(0, epoch))
    with_keys = [works for works in slices.values() if all(work.has_keys for work in works)]
    works = [[work for work in found if work.ledger == opened.ledger] for found in with_keys]
    # A lost worker may have had leases of the next epoch, of which nobody living knows.
    last = max([epoch if opened.lock_step else epoch + 1, *(work.epoch for found in works for work in found)])
    num_begun = min(last + 1, opened.num_epochs)
    unheld = IntervalSet([axis.epochs(epoch, num_begun)]).without(known).without(leased)
    everywhere, somewhere = _applied([_on_axis(found, axis) for found in works], unheld)
    _add(known, everywhere)
    partial = max(report.partial for report in held.values())
    if not missing:  # the steps of missing workers are counted when the servers have settled them
        partial += _num_steps(somewhere.without(everywhere), opened.batch_size)
    ledger.restore(epoch, num_begun, known, partial, max(report.clock for report in held.values()))
    for rank, report in held.items():
        ledger.restore_worker(rank, report.answered)
        if report.cut is not None:
            ledger.restore_cut(rank, report.cut)
        for lease in leases[rank]:
            ledger.restore_lease(rank, lease)
    return ledger, ledger.withhold(missing)


class _Applied(NamedTuple):
    """The points that a slice has applied, and those of steps that wait or were applied in part; see `SliceWork`."""

    points: IntervalSet
    waiting: IntervalSet
    complete: bool


def _on_axis(works: Sequence[SliceWork], axis: Axis) -> _Applied:
    """Return what a slice has applied. It has applied nothing in an epoch that it does not mention."""
    applied, waiting = IntervalSet(), IntervalSet()
    for work in works:
        _add(applied, axis.points(work.epoch, work.applied))
        _add(waiting, axis.points(work.epoch, ((one.start, one.stop) for one in work.waiting)))
    return _Applied(applied, waiting, all(work.complete for work in works))


def _applied(reports: Sequence[_Applied], unheld: IntervalSet) -> tuple[IntervalSet, IntervalSet]:
    """Return which of the points that no living worker has are applied by all slices, and by any of them."""
    whole = [report for report in reports if report.complete]
    everywhere = IntervalSet(unheld if whole else ())
    somewhere = IntervalSet()
    for report in reports:
        _add(somewhere, unheld.within(report.points))
        _add(somewhere, unheld.within(report.waiting))
    for report in whole:
        everywhere = everywhere.within(report.points).without(report.waiting)
    return everywhere, somewhere


def _num_steps(points: IntervalSet, batch_size: int) -> int:
    """Return how many steps of lost workers points stand for, at least."""
    return sum(-(-(stop - start) // batch_size) for start, stop in points)


def _add(positions: IntervalSet, intervals: Iterable[Interval]) -> None:
    for start, stop in intervals:
        positions.add(start, stop)
