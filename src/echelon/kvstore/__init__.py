"""Stores of weights that workers push gradients to and pull weights from: `create(name)` makes one."""

from echelon.kvstore.create import NAMES, create
from echelon.kvstore.store import KVStore

__all__ = ["NAMES", "KVStore", "create"]
