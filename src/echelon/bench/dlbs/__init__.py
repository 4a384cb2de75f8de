"""The benchmark harness of DLBS (seed 002): `echelon bench run --config config.json -P … -V … -E …`.

Read in this order. Pure: `source` (JSON whose errors have a line), `parameters` (the table of keys), `config` (files
and flags), `expand` (`${…}`), `plan` (variables and extensions), `experiment` (expanded parameters with their types),
`command` (the flags of training), `window` (times and rates of workers), `records` (log lines `__key__=json`), `rerun`
(what an existing log means). Around them: `files`, `execute` (runs one experiment), `sweep` (runs a plan), `table`,
`system_info`, `actions`, `flags`.

DLBS evaluates Python in configurations and computes the rate of all workers from that of rank 0. Neither is done here.
"""
