"""Benchmarks, run as `echelon bench NAME`: pushpull, train, io, costs, schemes and rows.

A *contender* is a job that a benchmark measures: Echelon itself, or another system that does the same work. All
contenders of a run are started first and then take turns on one machine, so that their ratio is meaningful. A *peer* is
a contender that runs beside Echelon when `--peer` names it.

To add a peer to a benchmark, write a function in that benchmark's `contenders.py`, add it to the `PEERS` table at the
end of that file, and put the program it starts beside it as `worker_NAME.py`.

Read `commands` first (the flags of every benchmark), then `pushpull` (`run`, `contenders`, the `worker_*` programs) as
the example, then `harness` (taking turns, processes, result files). `train` and `io` have the same layout as
`pushpull`.
"""
