"""A process that has imported torch, from which the Python processes of a job on this machine are forked.

Importing torch takes more than a second of CPU time. A job of two workers and two servers spent most of its start on
doing it four times. This process imports it once, and then forks a process for every request of the launcher
(`forked.py`). A forked process becomes a child of the launcher, and runs a script, a module or a text as `python` would
(`run_as_python.py`).
"""

from __future__ import annotations

import gc
import os
import random
import signal
import socket
import time
from collections.abc import Sequence

import msgspec
import numpy as np
import torch

from echelon.environment import replace_environment
from echelon.launch.local.forked import Forked, ForkRequest
from echelon.launch.local.run_as_python import run_as_python
from echelon.launch.supervision.processes import die_with_parent, ignore_termination

MODULES = ("echelon.train.trainer", "echelon.server.serve")
MAX_FDS = 3
ADOPTED_S = 10.0


_decode = msgspec.msgpack.Decoder(ForkRequest).decode
_encode = msgspec.msgpack.Encoder().encode


def serve(requests: socket.socket) -> None:
    """Fork processes until the launcher closes the connection. Returns, with what to run, only in forked processes."""
    while True:
        _, fds, _, _ = socket.recv_fds(requests, 1, MAX_FDS)
        if not fds:
            os._exit(0)
        written, *fds = fds
        with open(written, "rb") as file:
            request = _decode(file.read())
        child = os.fork()
        if child:
            os.waitpid(child, 0)
            for number in fds:
                os.close(number)
        else:
            _become(request, fds, requests)
            run_as_python(request.program)


def _become(request: ForkRequest, fds: Sequence[int], requests: socket.socket) -> None:
    """Turn this forked process into the one of a request: a child of the launcher, with its files and environment."""
    if os.fork():
        os._exit(0)  # the kernel makes the launcher the parent of the other one, because it adopts orphans
    deadline = time.monotonic() + ADOPTED_S
    while os.getppid() != request.parent:
        if time.monotonic() > deadline:
            os._exit(1)
        time.sleep(0)
    die_with_parent(request.parent)
    if request.shielded:
        ignore_termination()
    os.setsid()
    requests.send(_encode(Forked(request.number, os.getpid())))
    requests.close()
    for standard in (1, 2):
        os.dup2(fds[0], standard)
    os.close(fds[0])
    environment = dict(request.environment)
    if len(fds) > 1:
        os.set_inheritable(fds[1], True)
        environment["ECHELON_LISTEN_FD"] = str(fds[1])
    replace_environment(environment)
    random.seed()
    np.random.seed()  # otherwise all forked processes would draw the same numbers
    torch.default_generator.seed()
    signal.signal(signal.SIGINT, signal.default_int_handler)


def main(requests: int) -> None:
    """Import, then serve the launcher at the socket whose number is given."""
    for name in MODULES:
        __import__(name)
    gc.collect()
    gc.freeze()  # a forked process does not copy the pages of objects that nobody uses
    serve(socket.socket(fileno=requests))
