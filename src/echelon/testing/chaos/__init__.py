"""Random faults against real jobs: `python -m echelon.testing.chaos --minutes 10 --seed 1`.

`worker` is the program that the jobs run: a small model and many short epochs, whose samples a ledger hands out. `job`
starts one and follows its events. `injections` are the faults, each with the events that say that the job has recovered
from it. `campaign` runs one job after the other, one fault at a time, until the time is over, and has the history of
each job checked. `summary` is the table at the end.
"""
