"""What runs in a decode process: read, decode and augment samples, and write them into shared memory.

`SampleDecoder` does the work; the loader's threads use it too where there are no processes. `main` runs in the fork
server, which has imported this module and forks one decode process per request. Every process here ends when the
loader closes its end of the connection or dies.

Nothing here imports torch unless images are resized or recoloured: without it, a process starts in a tenth of the time.
The loader's side is in `decode_pool`.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import traceback
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, NoReturn, TypeAlias

import numpy as np
from numpy.typing import NDArray

from echelon.data.images.augment import Augmenter, Normaliser
from echelon.data.images.config import AugmentConfig
from echelon.data.images.geometry import Draws
from echelon.data.loading.sources import Source, class_number
from echelon.errors import DataError
from echelon.transport.shared_memory import SharedMemoryTransport

EXIT_TIMEOUT_S = 5.0  # decoding one request takes milliseconds, so a process that runs longer is stuck


@dataclass(frozen=True, slots=True)
class DecodeSettings:
    """How samples are decoded.

    `fast` allows shortcuts that change pixels slightly (see `images.decode`). `normalise` converts pixels to floats;
    otherwise they stay bytes.
    """

    source: Source
    augment: AugmentConfig
    fast: bool
    normalise: bool

    @property
    def needs_torch(self) -> bool:
        """Whether all images are resized or recoloured. Without that, an image may still be too small and need it."""
        config = self.augment
        resizes = config.resize > 0 or config.random_resized_crop or config.max_crop_size > 0
        return resizes or config.warps or config.changes_colour


class BadSample(NamedTuple):
    """A sample that cannot be decoded, and the reason."""

    reason: str


SampleResult: TypeAlias = int | NDArray[np.float32] | BadSample
"""The label or labels of a sample whose pixels have been written, or why there are none."""


class SampleDecoder:
    """Decodes samples one after another. Each thread needs its own."""

    def __init__(self, settings: DecodeSettings) -> None:
        self._settings = settings
        self._augmenter = Augmenter(settings.augment, settings.fast)
        self._normaliser = Normaliser(settings.augment)

    def decode(self, records: Sequence[int], draws: Sequence[Draws], images: NDArray[Any]) -> list[SampleResult]:
        """Decode some records; write the pixels of the first one to images[0], and so on."""
        return [self._try(*one) for one in zip(records, draws, images, strict=True)]

    def _try(self, number: int, draws: Draws, out: NDArray[Any]) -> SampleResult:
        try:
            return self._decode(number, draws, out)
        except DataError as error:
            return BadSample(str(error))

    def _decode(self, number: int, draws: Draws, out: NDArray[Any]) -> int | NDArray[np.float32]:
        source = self._settings.source
        sample = source.read(number)
        try:
            pixels = self._augmenter.augment(sample.payload, draws)
            label = class_number(sample.label) if isinstance(sample.label, float) else sample.label
        except DataError as error:
            raise DataError(f"{source.where(number)}: {error}") from error
        if self._settings.normalise:
            self._normaliser.into(out, pixels)
        else:
            np.copyto(out, pixels)
        return label


class DecodeSetup(NamedTuple):
    """The first message to a decode process: settings, and the shape and dtype of the buffers it writes to.

    The process keeps up to `num_buffers` attached. `descriptor` is one of them, to test whether it can attach any.
    """

    settings: DecodeSettings
    shape: tuple[int, ...]
    dtype: str
    num_buffers: int
    descriptor: str


class DecodeRequest(NamedTuple):
    """A later message: decode these records into the buffer with this descriptor, from image `start` on."""

    records: list[int]
    draws: list[list[float]]
    descriptor: str
    start: int


class _AttachedBuffers:
    """The attached buffers by descriptor. The least recently used one is detached when there are too many."""

    def __init__(self, setup: DecodeSetup) -> None:
        self._setup = setup
        self._transport = SharedMemoryTransport()
        self._attached: OrderedDict[str, NDArray[Any]] = OrderedDict()

    def get(self, descriptor: str) -> NDArray[Any] | None:
        if descriptor not in self._attached:
            memory = self._transport.attach(descriptor)
            if memory is None:
                return None
            self._attached[descriptor] = np.frombuffer(memory, self._setup.dtype).reshape(self._setup.shape)
        self._attached.move_to_end(descriptor)
        if len(self._attached) > self._setup.num_buffers:
            self._attached.popitem(last=False)
        return self._attached[descriptor]


def serve_requests(connection: Connection) -> None:
    """Answer the setup with whether the buffers can be attached, or with an error; then answer requests."""
    try:
        setup: DecodeSetup = connection.recv()  # opens the source's files, which may fail
    except DataError as error:
        connection.send(str(error))
        return
    buffers = _AttachedBuffers(setup)
    connection.send(buffers.get(setup.descriptor) is not None)
    decoder = SampleDecoder(setup.settings)
    while True:
        request: DecodeRequest = connection.recv()
        images = buffers.get(request.descriptor)
        assert images is not None, "this buffer cannot be attached, although the first one could"
        part = images[request.start : request.start + len(request.records)]
        connection.send(decoder.decode(request.records, request.draws, part))


def main(file: int) -> None:
    """Run the fork server. `file` is the descriptor of its control socket."""
    with suppress(ConnectionError):
        serve_forks(socket.socket(fileno=file))


def serve_forks(control: socket.socket) -> None:
    """Answer two requests until the control socket closes.

    "plain" or "torch" comes with a connection: fork a process that serves it, reply with its pid. A pid: wait until
    that process has exited, reply with its exit status.
    """
    while True:
        request, files, _, _ = socket.recv_fds(control, 64, 1)
        if not request:
            return
        reply = _fork(files[0], control, with_torch=request == b"torch") if files else _wait_for_exit(int(request))
        control.send(str(reply).encode())


def _wait_for_exit(pid: int) -> int:
    """Wait for a process whose connection is closed, kill it after a timeout, and return its exit status."""
    watch = os.pidfd_open(pid)
    if not select.select([watch], [], [], EXIT_TIMEOUT_S)[0]:
        os.kill(pid, signal.SIGKILL)
    os.close(watch)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _fork(file: int, control: socket.socket, *, with_torch: bool) -> int:
    if with_torch:
        import torch  # noqa: F401  # once, for all processes that are forked from now on
    pid = os.fork()
    if not pid:
        control.close()
        _run_forked(Connection(file))
    os.close(file)
    return pid


def _run_forked(connection: Connection) -> NoReturn:
    """Serve requests until the connection closes, then exit."""
    status = 0
    try:
        with suppress(EOFError, ConnectionError):
            serve_requests(connection)
    except BaseException:
        status = 1
        traceback.print_exc()
    os._exit(status)
