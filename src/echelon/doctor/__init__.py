"""`echelon doctor`: finds out before a job starts what would go wrong on its hosts, and says how to mend it.

`probe` runs on every host and answers questions (`messages`), `hosts` starts the probes over ssh and asks them, and
`diagnose`, which is pure, turns their answers into findings.
"""
