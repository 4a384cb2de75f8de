"""Stores of values that workers push gradients to and pull weights from. `create(name)` returns one.

Read in this order: `store` (the calls of every store and their checks), `values` (the keys and tensors of a call),
`create` (which store a name gives),
`servers/` (a store whose values are on servers), `collective/` (a store of a process group, without servers),
`multi_device` (a worker with several devices and servers). `optimizer_spec` and `state_files` are shared.
"""

from echelon.kvstore.create import create
from echelon.kvstore.store import KVStore

__all__ = ["KVStore", "create"]
