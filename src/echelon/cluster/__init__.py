"""What all processes of a job share. No torch, sockets, threads or time; only `shares` reads files.

`messages`    every message between processes, and its encoding
`membership`  the scheduler's state machine: registration, views, barriers, slices
`ledger`      who trains which samples
`placement`   where each key is stored
`shares`      the `groups` and `data_sharding` files
"""
