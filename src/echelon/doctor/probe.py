"""The probe: looks at one host for the doctor. `python -m echelon.doctor.probe`, over ssh.

It answers messages of its standard input on its standard output, and ends with its input. While it runs, it listens at
a free port for the probes of other hosts, which prove that the doctor sent them.
"""

from __future__ import annotations

import hmac
import os
import platform
import resource
import secrets
import shutil
import socket
import statistics
import subprocess
import sys
import threading
import time
from contextlib import suppress
from importlib import metadata

import msgspec
import psutil

from echelon.doctor.messages import Clock, Facts, FromProbe, Inspect, Measure, Measured, Time, ToProbe
from echelon.errors import UsageError
from echelon.launch.addresses import announced_address, own_addresses
from echelon.system import code_digest, usable_cores
from echelon.transport.framing import FrameReader, with_length
from echelon.transport.listening import listen

PACKAGES = ("torch", "numpy", "msgspec", "safetensors")
TOKEN_BYTES = 16
ROUND_TRIPS = 20
MEASURE_S = 0.3
TIMEOUT_S = 5.0
_CHUNK = bytes(1 << 20)


def facts(request: Inspect) -> tuple[Facts, socket.socket | None]:
    """Return what this host says about itself, and the socket at which it listens for others."""
    address, problem, listener = "", "", None
    try:
        address = announced_address(request.interface, request.name, request.peers)
        listener = listen(address)
    except (UsageError, OSError) as error:
        problem = str(error)
    return Facts(
        hostname=socket.gethostname(),
        python=platform.python_version(),
        versions={name: _version(name) for name in PACKAGES},
        digest=code_digest(),
        cores=usable_cores(),
        memory=psutil.virtual_memory().available,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        memfd=_has_memfd(),
        gpus=_gpus(),
        interfaces=[(name, own) for name, own in own_addresses() if name != "lo"],
        address=address,
        listening=listener.getsockname()[1] if listener else 0,
        token=secrets.token_bytes(TOKEN_BYTES),
        problem=problem,
        busy=_why_busy(address, request.port),
        folder=_why_not_usable(request.folder),
    ), listener


def answer_others(listener: socket.socket, token: bytes) -> None:
    """Serve other probes, one after the other: echo single bytes, then swallow what they send."""
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        with connection, suppress(OSError):
            connection.settimeout(TIMEOUT_S)
            if not hmac.compare_digest(_receive(connection, TOKEN_BYTES), token):
                continue
            for _ in range(ROUND_TRIPS):
                connection.sendall(_receive(connection, 1))
            while connection.recv(len(_CHUNK)):
                pass


def measure(request: Measure) -> Measured:
    """Connect to another host; return the latency and the bandwidth there."""
    try:
        with socket.create_connection((request.host, request.port), TIMEOUT_S) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(request.token)
            trips = []
            for _ in range(ROUND_TRIPS):
                began = time.perf_counter()
                connection.sendall(b"x")
                _receive(connection, 1)
                trips.append(time.perf_counter() - began)
            began, sent = time.perf_counter(), 0
            while time.perf_counter() - began < MEASURE_S:
                sent += connection.send(_CHUNK)
            connection.shutdown(socket.SHUT_WR)
            connection.recv(1)  # the end: the other side has received everything
            return Measured(statistics.median(trips), sent / (time.perf_counter() - began))
    except OSError as error:
        return Measured(problem=error.strerror or str(error))


def _receive(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = connection.recv(count - len(data))
        if not part:
            raise ConnectionError("the connection was closed")
        data += part
    return data


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _has_memfd() -> bool:
    try:
        os.close(os.memfd_create("echelon", os.MFD_CLOEXEC))
    except OSError:
        return False
    return True


def _gpus() -> list[str]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    try:
        query = [program, "--query-gpu=name", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True, timeout=TIMEOUT_S).stdout.splitlines()
    except (OSError, subprocess.TimeoutExpired):
        return []


def _why_busy(address: str, port: int | None) -> str:
    if port is None:
        return ""
    try:
        socket.create_server((address, port)).close()
    except OSError as error:
        return os.strerror(error.errno) if error.errno else str(error)
    return ""


def _why_not_usable(folder: str | None) -> str:
    if folder is None or os.access(folder, os.R_OK | os.X_OK):
        return ""
    return f"the folder {folder} does not exist there, or cannot be read"


def main() -> int:
    """Answer the doctor until its end of the connection closes."""
    output = os.dup(1)
    os.dup2(2, 1)  # nothing but messages may go to the doctor
    questions: FrameReader[ToProbe] = FrameReader(msgspec.msgpack.Decoder(ToProbe).decode)
    while data := os.read(0, 1 << 16):
        for question in questions.feed(data):
            os.write(output, with_length(msgspec.msgpack.encode(_answer(question))))
    os._exit(0)  # a thread may still wait for another host


def _answer(request: ToProbe) -> FromProbe:
    match request:
        case Inspect():
            found, listener = facts(request)
            if listener is not None:
                threading.Thread(target=answer_others, args=(listener, found.token), daemon=True).start()
            return found
        case Measure():
            return measure(request)
        case Clock():
            return Time(time.time())


if __name__ == "__main__":
    sys.exit(main())
