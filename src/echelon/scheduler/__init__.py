"""The scheduler process: a thin loop (`serve`) around the pure state machine `cluster.membership`. Imports no torch."""

from echelon.scheduler.serve import serve

__all__ = ["serve"]
