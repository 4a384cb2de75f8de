"""Fixtures of all tests. Those of `leaks` are autouse: a test that leaves something behind fails."""

import signal

import torch

from leaks import leaves_nothing, marked_session

__all__ = ["leaves_nothing", "marked_session"]

torch.set_num_threads(1)  # on two cores that also run servers and workers, one thread is faster
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs, and all they start, ignore it
