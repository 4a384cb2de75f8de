"""The benchmark harness of DLBS (seed 002): `echelon bench run --config config.json -P … -V … -E …`.

Read `configuration` first (from files and flags to experiments). Also pure: `command` (the flags of training), `window`
(times and rates of workers), `records` (log lines `__key__=json`), `rerun` (what an existing log means), `remaining`
(the time left). Around them: `files`, `execute` (runs one experiment, with `run_events`), `sweep` (runs a plan),
`table`, `system_info`, `actions`, `flags`.

DLBS evaluates Python in configurations and computes the rate of all workers from that of rank 0. Neither is done here.
"""
