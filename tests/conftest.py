"""Fixtures of all tests. Those of `leaks` are autouse: a test that leaves something behind fails."""

import os

# MKL keeps the memory of its products in lists that a fork may find locked for ever, or in disorder. It looks at this
# when it first multiplies.
os.environ["MKL_DISABLE_FAST_MM"] = "1"

import torch

from leaks import leaves_nothing, marked_session

__all__ = ["leaves_nothing", "marked_session"]

# Tests fork (`echelon.testing.forked`): a fork has none of the threads that OpenMP keeps for later, and would now and
# then wait for them for ever. On two cores that also run servers and workers, one thread is faster besides.
torch.set_num_threads(1)
