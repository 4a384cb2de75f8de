"""`echelon bench io`. Read `command`, then the `worker_*` programs (add a peer there)."""
