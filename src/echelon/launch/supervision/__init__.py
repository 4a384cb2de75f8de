"""Running the processes of a job to their end, wherever they run.

`supervise` is the loop. `processes` is what it needs of a process, `children` what it knows of each. `restarts` says
which processes are started again, `verdict` what the exit status is; `explain` and `last_lines` show why a job failed,
and `signals` collects the signals that stop it.
"""
