"""Echelon trains PyTorch models on many workers; one flag says how strictly they wait for each other.

`echelon.Trainer` and `echelon.kvstore` are what most programs need. Importing the package starts nothing and loads
nothing heavy: the scheduler runs without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from echelon import kvstore as kvstore
    from echelon.train.trainer import Trainer as Trainer

__version__ = "0.1.0"
__all__ = ["Trainer", "kvstore"]


def __getattr__(name: str) -> Any:
    if name == "Trainer":
        return import_module("echelon.train.trainer").Trainer
    if name == "kvstore":
        return import_module("echelon.kvstore")
    raise AttributeError(f"module 'echelon' has no attribute {name!r}")
