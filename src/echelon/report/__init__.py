"""Reports of a run that `echelon train` starts, all made from its events.

Read `runs` (run directories), `state` (a run, as its events describe it), `summary` (`summary.json`), then what a user
sees: `display` (the live display), its `screen`, its `lines` and the `columns` of its table; `result` (the last lines);
`curves` (`curves.png`), with `time_curve`.
"""
