"""Running a program in a forked process as `python` runs it: the same `__main__`, command line, errors and status."""

from __future__ import annotations

import builtins
import ctypes
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Sequence
from importlib.machinery import BuiltinImporter, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import NoReturn

_STAT_COMMAND_LINE = slice(45, 47)  # the addresses of its begin and end, after the command name in /proc/self/stat


def run_as_python(program: Sequence[str]) -> NoReturn:
    """Run what follows `python` on a command line, and exit as `python` would."""
    try:
        show_command_line([sys.executable, *program])
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


def show_command_line(arguments: Sequence[str]) -> None:
    """Let ps, pgrep and nvidia-smi show other arguments for this process, cut to the room that its own ones take."""
    sys.orig_argv = list(arguments)
    stat = Path("/proc/self/stat").read_text(errors="replace").rpartition(")")[2].split()
    start, end = map(int, stat[_STAT_COMMAND_LINE])
    if not 0 < start < end:
        return  # the kernel does not say
    text = b"".join(os.fsencode(argument) + b"\0" for argument in arguments)
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, text, min(len(text), end - start - 1))


def _execute(program: Sequence[str]) -> None:
    kind, rest = program[0], list(program[1:])
    if kind == "-u":
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(write_through=True)  # type: ignore[union-attr]
        _execute(rest)
    elif kind == "-m":
        sys.argv = rest
        _search_first(os.getcwd())
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        _search_first("")
        main = _new_main(BuiltinImporter)
        _execute_in(main, _compile(rest[0], "<string>"))
    else:
        sys.argv = list(program)
        _search_first(os.path.dirname(os.path.realpath(kind)))
        path = os.path.join(os.getcwd(), kind)  # not normalized, as in Python
        main = _new_main(SourceFileLoader("__main__", path))
        vars(main).update(__file__=path, __cached__=None)
        _execute_in(main, _compile(Path(path).read_bytes(), path))


def _search_first(folder: str) -> None:
    if not sys.flags.safe_path:
        sys.path.insert(0, folder)


def _compile(source: str | bytes, path: str) -> CodeType:
    return compile(source, path, "exec", dont_inherit=True)  # otherwise the future imports of this module are inherited


def _new_main(loader: object) -> ModuleType:
    main = ModuleType("__main__")
    vars(main).update(__builtins__=builtins, __annotations__={}, __loader__=loader)
    return main


def _execute_in(main: ModuleType, code: CodeType) -> None:
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
