"""Reports of a run that `echelon train` starts, all made from its events.

Read `runs` (run directories), `summary` (the state of a run, and `summary.json`), `display` (the live table), `curves`
(`curves.png`).
"""
