"""`echelon bench load`: many processes of a small model on one machine, for minutes. Nothing is compared.

It shows that a job of many workers and servers makes progress all the time and that its memory does not grow. Read
`run` first (one job per scheme), then `watch` (what counts as a deadlock, and how memory is compared), then `worker`.
"""
