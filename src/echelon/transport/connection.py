"""One connection that carries messages of frames. Frames are not copied on the way in or out.

On the wire a message is the number of its frames, their sizes, the first frame (the head) and the other frames. The
reader is a state machine with one state per part of the message:

    state     bytes it waits for             when they are complete
    COUNT     4: the number of frames        -> SIZES
    SIZES     8 per frame                    -> HEAD
    HEAD      the first frame                -> FRAMES, or the message is complete
    FRAMES    one of the other frames        -> FRAMES, or the message is complete

When the head is complete, a `placer` may choose the memory for the other frames, so that their bytes go from the kernel
or from TLS to their final place. It may also refuse them, before memory is taken for them.

One call of `read` receives a limited number of bytes, so that no connection keeps its process from reading the others.
"""

from __future__ import annotations

import enum
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path

import numpy as np

from echelon.transport.admission.channel import Channel
from echelon.transport.interface import Buffer, Peer, Placer, Traffic
from echelon.transport.liveness import SILENT_S, silence_s
from echelon.transport.outbox import Outbox, Precedence

BUFFER_BYTES = 4 << 20
MAX_FRAMES = 1 << 18
MAX_HEAD = 32 << 20
MAX_BYTES = 1 << 38
MAX_NAME = 512  # bytes of the first message to a server
TURN_BYTES = 16 << 20  # received from one connection before the others have their turn
_MAX_SENT_AT_ONCE = 256  # buffers in one call of sendmsg; the kernel allows 1024
_COUNT = struct.Struct("!I")
Place = Callable[[memoryview, list[int]], Sequence[memoryview] | None]  # a `Placer` for one peer


class ConnectionBroken(Exception):
    """The connection has ended, or its bytes are not a valid message."""


class State(enum.IntEnum):
    """The part of a message that a reader waits for."""

    COUNT = 0
    SIZES = 1
    HEAD = 2
    FRAMES = 3


COUNT, SIZES, HEAD, FRAMES = State  # `State.FRAMES` would cost a lookup of about 100 ns per frame


class MessageReader:
    """Assembles messages from a byte stream. See the table at the top of this module."""

    def __init__(self) -> None:
        self.state = COUNT
        self.max_head = MAX_HEAD
        self.interrupted = False  # whether the last call of `read` stopped although more bytes may be available
        self._target = memoryview(bytearray(_COUNT.size))  # where the bytes of this state go
        self._filled = 0
        self._sizes: Sequence[int] = ()
        self._frames: list[memoryview] = []
        self._places: list[memoryview] = []  # the memory of the frames that are still to come, the next one last

    def read(self, recv_into: Callable[[memoryview], int], place: Place | None) -> list[memoryview] | None:
        """Read until a message is complete and return its frames.

        Return None if no more bytes are available now, or if it is the turn of other connections (`interrupted`).
        """
        left = TURN_BYTES
        self.interrupted = False
        while left > 0:
            while self._filled == len(self._target):
                self.state = _ON_COMPLETE[self.state](self, place)
                if self.state is COUNT:
                    frames, self._frames = self._frames, []
                    return frames
            try:
                count = recv_into(self._target[self._filled :])
            except BlockingIOError:
                return None
            except OSError as error:
                raise ConnectionBroken(str(error)) from error
            if not count:
                raise ConnectionBroken("the other side closed the connection")
            self._filled += count
            left -= count
        self.interrupted = True
        return None

    @property
    def is_within_message(self) -> bool:
        """Whether a part of a message has arrived, and the rest has not."""
        return self.state is not COUNT or self._filled > 0

    def _count_complete(self, place: Place | None) -> State:
        (count,) = _COUNT.unpack(self._target)
        if not 0 < count <= MAX_FRAMES:
            raise ConnectionBroken(f"a message of {count} frames")
        self._target, self._filled = memoryview(bytearray(8 * count)), 0
        return SIZES

    def _sizes_complete(self, place: Place | None) -> State:
        self._sizes = struct.unpack(f"!{len(self._target) // 8}Q", self._target)
        if self._sizes[0] > self.max_head or sum(self._sizes) > MAX_BYTES:
            raise ConnectionBroken(f"a message of {sum(self._sizes)} bytes")
        self._target, self._filled = _memory(self._sizes[0]), 0
        return HEAD

    def _head_complete(self, place: Place | None) -> State:
        self._places = self._choose_places(self._target, place)
        return self._frame_complete(place)

    def _frame_complete(self, place: Place | None) -> State:
        self._frames.append(self._target)
        self._filled = 0
        if self._places:
            self._target = self._places.pop()
            return FRAMES
        self._target = memoryview(bytearray(_COUNT.size))
        return COUNT

    def _choose_places(self, head: memoryview, place: Place | None) -> list[memoryview]:
        sizes = list(self._sizes[1:])
        chosen = place(head, sizes) if place is not None and sizes else None
        if chosen is not None and [len(place) for place in chosen] == sizes:
            return list(reversed(chosen))
        return [_memory(size) for size in reversed(sizes)]


def _memory(size: int) -> memoryview:
    """Return memory that is not zeroed, unlike a bytearray: its pages are allocated when bytes arrive."""
    try:
        return np.empty(size, np.uint8).data
    except MemoryError as error:
        raise ConnectionBroken(f"no memory for a frame of {size} bytes") from error


_ON_COMPLETE: tuple[Callable[[MessageReader, Place | None], State], ...] = (  # by state
    MessageReader._count_complete,
    MessageReader._sizes_complete,
    MessageReader._head_complete,
    MessageReader._frame_complete,
)


def buffer_bytes(max_fixed: int, max_automatic: int) -> int | None:
    """Return the size that a program should give a socket buffer, or None if the kernel finds a larger one itself.

    A size that a program sets is limited by `max_fixed` and then doubled, and turns off the growth to `max_automatic`.
    Where `max_fixed` has its usual 208 kB, a set size would limit a link of 20 ms to 10 MB/s.
    """
    fixed = min(BUFFER_BYTES, max_fixed)
    return fixed if 2 * fixed > max_automatic else None


@cache
def _fixed_sizes() -> dict[int, int]:
    """Return the sizes of the socket buffers that are better than what the kernel chooses, by their options."""
    sizes = {}
    for option, name in ((socket.SO_SNDBUF, "wmem"), (socket.SO_RCVBUF, "rmem")):
        try:
            max_fixed = int(Path(f"/proc/sys/net/core/{name}_max").read_text())
            max_automatic = int(Path(f"/proc/sys/net/ipv4/tcp_{name}").read_text().split()[2])
        except OSError:
            continue
        if (size := buffer_bytes(max_fixed, max_automatic)) is not None:
            sizes[option] = size
    return sizes


class Connection:
    """A channel, the message that is being received, and the messages that wait to be sent."""

    def __init__(self, channel: Channel, traffic: Traffic) -> None:
        """`traffic` counts the bytes of all connections of an endpoint."""
        for option, fixed_bytes in _fixed_sizes().items():
            channel.socket.setsockopt(socket.SOL_SOCKET, option, fixed_bytes)
        self.channel = channel
        self._traffic = traffic
        self.fileno = channel.fileno
        self.name: Peer | None = None  # a server's connection has none until the client has sent its name
        self.closed = False
        self.reader = MessageReader()
        self.num_received = 0  # messages, without the one that says the client's name
        self.received_at = 0.0  # when a part of a message that is not complete arrived
        self.sent_at = 0.0  # when the kernel accepted bytes, or the first ones began to wait
        self.is_paused = False  # whether it is not read, because the other side does not read its answers
        self._outbox = Outbox()
        self._lock = threading.Lock()  # of _outbox

    @property
    def waiting_bytes(self) -> int:
        """How many bytes the kernel has not accepted yet."""
        return self._outbox.num_bytes

    def read(self, placer: Placer | None) -> list[memoryview] | None:
        """Return the frames of the next message, or None if it is not complete yet (see `MessageReader.read`)."""
        place = None if placer is None else partial(placer, b"" if self.name is None else self.name)
        frames = self.reader.read(self._recv_into, place)
        if frames is None and self.reader.is_within_message:
            self.received_at = time.monotonic()
        return frames

    def _recv_into(self, target: memoryview) -> int:
        count = self.channel.recv_into(target)
        self._traffic.received += count
        return count

    def is_stalled(self, now: float, limit_s: float) -> bool:
        """Return whether a message that is half received or half sent has made no progress for a time."""
        receives, sends = self.reader.is_within_message and not self.is_paused, self.waiting_bytes > 0
        return (receives and now - self.received_at > limit_s) or (sends and now - self.sent_at > limit_s)

    def is_half_open(self) -> bool:
        """Return whether the machine at the other end does not answer any more."""
        try:
            return silence_s(self.channel.socket) > SILENT_S
        except OSError:
            return False  # not a TCP socket; if it is broken, the next call that reads or writes reports it

    def send(self, frames: Sequence[Buffer], precedence: Precedence | None = None) -> bool:
        """Queue a message and send what the kernel accepts now. Return False if something is left for `flush`."""
        views = [memoryview(frame) for frame in frames]
        head = struct.pack(f"!I{len(views)}Q", len(views), *(view.nbytes for view in views))
        with self._lock:
            waiting = bool(self._outbox)
            if not waiting:
                self.sent_at = time.monotonic()
            self._outbox.put([memoryview(head), *(view.cast("B") for view in views if view.nbytes)], precedence)
            return False if waiting else self._flush()

    def flush(self) -> bool:
        """Send what the kernel accepts now, and return whether nothing is left."""
        with self._lock:
            return self._flush()

    def _flush(self) -> bool:
        while self._outbox and not self.closed:
            try:
                sent = self.channel.sendmsg(self._outbox.first(_MAX_SENT_AT_ONCE))
            except BlockingIOError:
                return False
            except OSError as error:
                self._outbox.clear()
                raise ConnectionBroken(str(error)) from error
            self._traffic.sent += sent
            self._outbox.remove(sent)
            self.sent_at = time.monotonic()
        return True

    def close(self, linger_s: float = 0.0) -> None:
        """Close the connection. Messages that wait to be sent get `linger_s` to leave."""
        with self._lock:
            try:
                self._flush_until(time.monotonic() + linger_s)
            except ConnectionBroken:
                pass
            self.closed = True
            self._outbox.clear()
            self.channel.close()

    def _flush_until(self, deadline: float) -> None:
        poll = select.poll()
        poll.register(self.channel.fileno(), select.POLLOUT)
        while (left_s := deadline - time.monotonic()) > 0 and not self._flush():
            poll.poll(left_s * 1e3)
