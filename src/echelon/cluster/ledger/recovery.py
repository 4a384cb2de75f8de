"""How a scheduler that was started again rebuilds a ledger from what the living processes report.

Workers report their latest leases and the newest state that they have seen; servers report which positions they have
applied. A position is done if a worker knows it as done, or if all slices have applied it and no living worker has it
in a lease: a worker that has left trained it. A position that only some slices have applied, and that no living worker
has, was half pushed by a worker that has left: it is counted as partial and trained again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

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
    ledger = Ledger(opened, num_slices, set(expected) - held.keys())
    epoch = max(report.epoch for report in held.values())
    mine = {rank: [lease for lease in report.leases if lease.epoch == epoch] for rank, report in held.items()}
    known = IntervalSet(interval for report in held.values() if report.epoch == epoch for interval in report.done)
    leased = IntervalSet()
    for lease in (lease for leases in mine.values() for lease in leases):
        _add(known, lease.batches[: lease.trained])
        _add(leased, lease.batches[lease.trained :])
    if epoch == opened.epoch:
        _add(known, opened.done)
    with_keys = [works for works in slices.values() if all(work.has_keys for work in works)]
    reports = [_of_epoch(works, opened.ledger, epoch) for works in with_keys]
    unheld = IntervalSet([(0, opened.num_samples)]).without(known).without(leased)
    everywhere, somewhere = _applied(reports, unheld)
    _add(known, everywhere)
    partial = max(report.partial for report in held.values())
    if not missing:  # the steps of missing workers are counted when the servers have settled them
        partial += _num_steps(somewhere.without(everywhere), opened.batch_size)
    ledger.restore(epoch, known, partial, max(report.clock for report in held.values()))
    for rank, report in held.items():
        ledger.restore_worker(rank, report.answered)
        if report.cut is not None:
            ledger.restore_cut(rank, report.cut)
        for lease in mine[rank]:
            ledger.restore_lease(rank, lease.number, lease.batches, lease.trained)
    return ledger, ledger.withhold(missing)


def _of_epoch(works: Sequence[SliceWork], ledger: int, epoch: int) -> SliceWork:
    """Return what a slice has applied in an epoch. A slice that does not mention it has applied nothing."""
    found = (work for work in works if (work.ledger, work.epoch) == (ledger, epoch))
    return next(found, SliceWork(0, ledger, epoch, []))


def _applied(reports: Sequence[SliceWork], unheld: IntervalSet) -> tuple[IntervalSet, IntervalSet]:
    """Return which of the positions that no living worker has are applied by all slices, and by any of them."""
    whole = [report for report in reports if report.complete]
    everywhere = IntervalSet(unheld if whole else ())
    somewhere = IntervalSet()
    for report in reports:
        _add(somewhere, unheld.within(IntervalSet(report.applied)))
        _add(somewhere, unheld.within(IntervalSet((work.start, work.stop) for work in report.waiting)))
    for report in whole:
        waiting = ((work.start, work.stop) for work in report.waiting)
        everywhere = everywhere.within(IntervalSet(report.applied)).without(waiting)
    return everywhere, somewhere


def _num_steps(positions: IntervalSet, batch_size: int) -> int:
    """Return how many steps of lost workers positions stand for, at least."""
    return sum(-(-(stop - start) // batch_size) for start, stop in positions)


def _add(positions: IntervalSet, intervals: Iterable[Interval]) -> None:
    for start, stop in intervals:
        positions.add(start, stop)
