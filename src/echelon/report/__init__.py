"""Reports of runs, all made from their events.

Read `runs` (run directories), `state` (a run, as its events describe it), `summary` (`summary.json`), then what a user
sees: `terminal` (the live display and the result), `charts` (what the charts of recorded runs show), `plots` (charts as
files) and `page` (charts as one HTML page).
"""
