"""`echelon bench pushpull`. Read `command`, then `contenders` (add a peer there) and the `worker_*` programs."""
