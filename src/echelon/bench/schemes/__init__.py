"""`echelon bench schemes`: the time to an accuracy under the four schemes, for equal, slow and stalling workers.

Each step takes a given time, as if an accelerator computed it, so two cores are enough for four workers. Read `cases`
(what is compared), `run` (the command), `measure` (one job), `link` (a slow link to one worker) and `table`.
"""
