"""Echelon trains PyTorch models on many workers. One flag sets how strictly the workers wait for each other.

Most programs need `echelon.Trainer` and `echelon.kvstore`. Importing the package starts nothing and does not import
torch, so that the scheduler runs without it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from echelon import kvstore as kvstore
    from echelon import optim as optim
    from echelon.train.trainer import LeaseSampler as LeaseSampler
    from echelon.train.trainer import Trainer as Trainer

__version__ = "0.1.0"
__all__ = ["LeaseSampler", "Trainer", "kvstore", "optim"]


def __getattr__(name: str) -> Any:
    if name in ("LeaseSampler", "Trainer"):
        return getattr(import_module("echelon.train.trainer"), name)
    if name in ("kvstore", "optim"):
        return import_module(f"echelon.{name}")
    raise AttributeError(f"module 'echelon' has no attribute {name!r}")
