"""The live page of a run: `echelon dash`, and `--dash` while training.

Read `snapshot` (what the page shows, as plain data), `metrics` (the same for Prometheus), `access` (who may read the
page), `app` (its addresses), then `serve` (sockets and processes). `templates/` has the HTML, `assets/` the style, the
script and uPlot 1.6.32, which draws the curves; its licence is beside it.

The page is served by a process of its own, with a lower priority, that only reads the folder of the run. A thread of
the launcher would share its interpreter with the workers of `--launcher inproc`, and would not survive where it forks.
"""
