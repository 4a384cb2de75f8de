"""A process that has imported torch, from which the Python processes of a job on this machine are forked.

Importing torch takes more than a second of CPU time. A job of two workers and two servers spent most of its start on
doing it four times. `python -m echelon.launch.preload` imports it once, and then forks a process for every request of
the launcher (`forked.py`). A forked process becomes a child of the launcher, and runs a script, a module or a text as
`python` would.
"""

from __future__ import annotations

import gc
import os
import random
import runpy
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from types import CodeType, ModuleType, TracebackType
from typing import NoReturn

import msgspec
import numpy as np

from echelon.environment import replace_environment
from echelon.launch.forked import Forked, ForkRequest
from echelon.launch.processes import die_with_parent

MODULES = ("echelon.train.trainer", "echelon.server.serve")
MAX_REQUEST, MAX_FDS = 1 << 20, 2
ADOPTED_S = 10.0


_decode = msgspec.msgpack.Decoder(ForkRequest).decode
_encode = msgspec.msgpack.Encoder().encode


def serve(requests: socket.socket) -> None:
    """Fork processes until the launcher closes the connection. Returns, with what to run, only in forked processes."""
    while True:
        data, fds, _, _ = socket.recv_fds(requests, MAX_REQUEST, MAX_FDS)
        if not data:
            os._exit(0)
        request = _decode(data)
        child = os.fork()
        if child:
            os.waitpid(child, 0)
            for number in fds:
                os.close(number)
        else:
            _become(request, fds, requests)
            _run(request.program)


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
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _run(program: Sequence[str]) -> NoReturn:
    """Run a program as `python` does, and exit as it would."""
    try:
        _execute(program)
    except SystemExit:
        raise
    except BaseException as error:
        error.__traceback__ = _without_own_frames(error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        sys.exit(1)
    sys.exit(0)


def _execute(program: Sequence[str]) -> None:
    kind, rest = program[0], list(program[1:])
    if kind == "-u":
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(write_through=True)  # type: ignore[union-attr]
        _execute(rest)
    elif kind == "-m":
        sys.argv, sys.path[0] = rest, os.getcwd()
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv, sys.path[0] = ["-c", *rest[1:]], ""
        _execute_as_main(compile(rest[0], "<string>", "exec"))
    else:
        sys.argv, sys.path[0] = list(program), os.path.dirname(os.path.realpath(kind))
        with open(kind, "rb") as file:
            code = compile(file.read(), kind, "exec")
        _execute_as_main(code, __file__=kind)


def _execute_as_main(code: CodeType, **attributes: str) -> None:
    main = ModuleType("__main__")
    vars(main).update(attributes)
    sys.modules["__main__"] = main
    exec(code, vars(main))


def _without_own_frames(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback from the program's first frame on."""
    frames = traceback.walk_tb(trace)
    own = (__file__, runpy.__file__)
    for frame, _ in frames:
        if frame.f_code.co_filename in own or frame.f_code.co_filename.startswith("<frozen "):
            trace = trace.tb_next if trace else None
        else:
            break
    return trace


def main() -> None:
    """Import, then serve the launcher at the socket whose number is the only argument."""
    for name in MODULES:
        __import__(name)
    gc.collect()
    gc.freeze()  # a forked process does not copy the pages of objects that nobody uses
    serve(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    main()
