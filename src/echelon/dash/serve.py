"""Sockets and processes of the live page: where it listens, what its address is, and how it runs beside a job."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import os
import secrets
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import msgspec

from echelon.errors import UsageError
from echelon.transport.listening import LOOPBACK

if TYPE_CHECKING:
    import uvicorn

DEFAULT_PORT = 8077
NICENESS = 10  # training comes first
BACKLOG = 64
_CLOSE_S = 5.0


class Settings(msgspec.Struct, frozen=True):
    """What the process of the page is told by the process that started it."""

    folder: str
    socket: int  # the number of its open file
    token: str | None


@dataclass(frozen=True, slots=True)
class Listener:
    """A listening socket, its address, and the token that readers need; None on a loopback address."""

    bound: socket.socket
    host: str
    port: int
    token: str | None

    @classmethod
    def of(cls, bound: socket.socket, token: str | None) -> Listener:
        """Return the listener of a bound socket."""
        host, port, *_ = bound.getsockname()
        return cls(bound, host, port, token)

    @property
    def url(self) -> str:
        """The address to open, with the token where one is needed."""
        host = socket.gethostname() if ipaddress.ip_address(self.host).is_unspecified else self.host
        shown = f"[{host}]" if ":" in host else host
        return f"http://{shown}:{self.port}/" + (f"?token={self.token}" if self.token else "")


def read_address(text: str) -> tuple[str, int]:
    """Return host and port of `PORT` or `HOST:PORT`; an IPv6 address is in brackets."""
    host, _, port = text.rpartition(":")
    if not (port.isascii() and port.isdigit()):
        raise UsageError(f"{text!r} is neither a port nor HOST:PORT, such as {DEFAULT_PORT} or 0.0.0.0:{DEFAULT_PORT}")
    return host.strip("[]") or LOOPBACK, int(port)


def listen(host: str = LOOPBACK, port: int | None = None) -> Listener:
    """Bind a socket, so that a port in use is an error here. Without a port, any free one replaces the usual one."""
    if port is not None and not 0 <= port <= 65535:
        raise UsageError(f"port {port} of the live page is outside 0 to 65535; 0 means any free port")
    try:
        wanted = DEFAULT_PORT if port is None else port
        family, _, _, _, address = socket.getaddrinfo(host, wanted, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise UsageError(
            f"the live page cannot listen on {host!r}: {error.strerror}; give an address of this machine"
        ) from error
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        _bind(bound, address, or_any_port=port is None)
    except OSError as error:
        bound.close()
        raise UsageError(
            f"the live page cannot listen on {host} port {wanted}: {error.strerror}; "
            "give another port, 0 for any free one, or an address of this machine"
        ) from error
    is_local = ipaddress.ip_address(bound.getsockname()[0]).is_loopback
    return Listener.of(bound, None if is_local else secrets.token_urlsafe(24))


def _bind(unbound: socket.socket, address: tuple[Any, ...], *, or_any_port: bool) -> None:
    unbound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        unbound.bind(address)
        unbound.listen(BACKLOG)
    except OSError as error:
        if not or_any_port or error.errno != errno.EADDRINUSE:
            raise
        unbound.bind((address[0], 0, *address[2:]))
        unbound.listen(BACKLOG)


def check_installed() -> None:
    """Raise UsageError if the packages of the page are not installed."""
    try:
        import jinja2
        import starlette
        import uvicorn
    except ImportError as error:
        raise UsageError(
            f"the live page needs a package that is not installed ({error}); pip install 'echelon[dash]'"
        ) from error
    del jinja2, starlette, uvicorn


def serve(folder: Path, listener: Listener) -> None:
    """Serve the page of a run until this process is interrupted."""
    server = _server(folder, listener)
    server.run(sockets=[listener.bound])


def _server(folder: Path, listener: Listener) -> uvicorn.Server:
    import uvicorn  # optional, and imported only if used

    from echelon.dash.app import make_app
    from echelon.report.follow import RunFollower

    follower = RunFollower(folder)
    follower.read()  # a log that may not be read is an error here
    app = make_app(follower, token=listener.token, port=listener.port)
    # No access log: it would show the token.
    return uvicorn.Server(
        uvicorn.Config(
            app, log_level="warning", access_log=False, server_header=False, ws="none", timeout_graceful_shutdown=1
        )
    )


class PageProcess:
    """A process that serves the page of a run while the block runs, and that ends with this process in any case."""

    def __init__(self, folder: Path, listener: Listener) -> None:
        self._folder = folder
        self._listener = listener
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        number = self._listener.bound.fileno()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "echelon.dash.serve"],
            stdin=subprocess.PIPE,
            pass_fds=[number],
            start_new_session=True,  # Ctrl-C ends the job; the page ends after it
        )
        assert self._process.stdin is not None
        settings = Settings(str(self._folder.absolute()), number, self._listener.token)
        self._process.stdin.write(msgspec.json.encode(settings) + b"\n")
        self._process.stdin.flush()
        self._listener.bound.close()  # here, before workers are forked
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.terminate()  # forked processes of the job may hold the other end of its input
        try:
            self._process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


async def _serve_until_input_ends(server: uvicorn.Server, bound: socket.socket) -> None:
    """Serve until the other end of standard input is closed, which also happens when its process is killed."""
    loop = asyncio.get_running_loop()
    loop.add_reader(sys.stdin.fileno(), lambda: setattr(server, "should_exit", not os.read(sys.stdin.fileno(), 4096)))
    await server.serve(sockets=[bound])


def main() -> None:
    """Run the process of the page."""
    settings = msgspec.json.decode(sys.stdin.buffer.readline(), type=Settings)
    os.nice(NICENESS)
    listener = Listener.of(socket.socket(fileno=settings.socket), settings.token)
    asyncio.run(_serve_until_input_ends(_server(Path(settings.folder), listener), listener.bound))


if __name__ == "__main__":
    main()
