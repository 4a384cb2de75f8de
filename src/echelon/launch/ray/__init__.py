"""The Ray launcher: the processes of a job as actors in a placement group of a Ray cluster.

`launcher` makes the plan. `driver` is the process that talks to Ray, and `actor` what runs on Ray's nodes: only these
two import Ray, which is optional (`echelon[ray]`). `backend` connects the launcher with its driver, and `placement` has
what the two say to each other.
"""
