"""The scheduler: a thin loop around `cluster.membership`. Imports no torch."""

from echelon.scheduler.serve import serve

__all__ = ["serve"]
