"""An `Admission` in a thread of its own, for a process whose main thread may be busy for a long time."""

from __future__ import annotations

import os
import selectors
import socket
import threading
from collections import deque

from echelon.transport.admission.admission import Admission, Strangers
from echelon.transport.admission.channel import Channel
from echelon.transport.admission.credentials import Security

_EXPIRE_S = 1.0


class AdmissionThread:
    """Lets clients in while the owner computes. Its file number is readable when `take` returns something."""

    def __init__(self, listener: socket.socket, security: Security, strangers: Strangers) -> None:
        self._selector = selectors.DefaultSelector()
        self._admission = Admission(listener, security, self._selector, strangers)
        self._admitted: deque[Channel] = deque()
        self._signal = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._stop = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector.register(self._stop, selectors.EVENT_READ, None)
        self._thread = threading.Thread(target=self._run, name="echelon-admit", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """Return the number that selectors use."""
        return self._signal

    def take(self) -> list[Channel]:
        """Return the connections that have proved the credentials since the last call."""
        os.eventfd_read(self._signal)
        return [self._admitted.popleft() for _ in range(len(self._admitted))]

    def close(self) -> None:
        """Stop the thread, and close the listener and the connections that were not taken."""
        os.eventfd_write(self._stop, 1)
        self._thread.join()
        self._admission.close()
        self._selector.close()
        for channel in self._admitted:
            channel.close()
        os.close(self._stop)
        os.close(self._signal)

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select(_EXPIRE_S if self._admission.num_unproven else None):
                if key.data is None:
                    return
                if (channel := self._admission.advance(key.data)) is not None:
                    self._admitted.append(channel)
                    os.eventfd_write(self._signal, 1)
            self._admission.expire()
