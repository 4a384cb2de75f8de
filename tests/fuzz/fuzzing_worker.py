"""A worker that sends random messages to the scheduler and to the server of its own job, beside workers that train.

Started as `fuzzing_worker.py SPEC` by all workers of a job. All but the last run faults/worker.py. The last one has the
job's credentials and a place in the job, like any process with an error in it: it registers, closes the store of the
others, and sends messages to a store of its own. Some connections come from a stranger without credentials.
"""

from __future__ import annotations

import json
import os
import select
import socket
import struct
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from random import Random
from typing import Any, get_args

from echelon.cluster.messages import (
    SERVER,
    WORKER,
    Ask,
    Configure,
    FromProcess,
    Leave,
    Malformed,
    Refused,
    Register,
    Request,
    Status,
    StoreClosed,
    StoreOpened,
    decode_control,
    decode_response,
    encode,
)
from echelon.environment import Job
from echelon.transport.admission.admission import connect
from echelon.transport.admission.channel import Channel, send_all
from echelon.transport.admission.credentials import Security
from echelon.transport.connection import ConnectionBroken, MessageReader
from echelon.transport.control import frame
from echelon.transport.framing import FrameReader
from echelon.transport.registration import register
from echelon.transport.sockets import TcpTransport
from fuzz.messages import MessageSource
from jobs import TESTS

OWN_STORE = 1
END_ID = 1 << 40
ANSWER_S = 20.0
IDLE = 40  # connections that send a part of a message and then nothing
Address = tuple[str, int]


def main() -> None:
    spec = json.loads(sys.argv[1])
    job = Job.from_environment()
    assert job.rank is not None
    if job.rank < job.num_workers - 1:
        os.execv(sys.executable, [sys.executable, str(TESTS / "faults" / "worker.py"), json.dumps(spec["plan"])])
    assert job.run_dir is not None
    run = Path(job.run_dir)
    with register(job, WORKER, TcpTransport(Security.of(job))) as post:
        for message in (StoreOpened(0), StoreClosed(0, post.rank), StoreOpened(OWN_STORE)):
            post.control.send(message)
        own = next(m for m in post.roster.members if (m.role, m.rank) == (WORKER, post.rank))
        server = next(m.address for m in post.roster.members if m.role == SERVER)
        fuzzer = Fuzzer(job, f"{own.endpoint_name}.fuzz", server, spec["seed"])
        fuzzer.run(spec["messages"] // 5)
        (run / "warm").touch()
        fuzzer.run(spec["messages"])
        assert post.control.lost is None, post.control.lost
        fuzzer.close()
        (run / "fuzzed").write_text(json.dumps({**fuzzer.counts, "answers": fuzzer.answers}))
        (run / "open").touch()
        post.control.send(Leave("it finished"))


class Fuzzer:
    """Sends random messages over many short connections, each until the other side answers the last or hangs up."""

    def __init__(self, job: Job, name: str, server: str, seed: int) -> None:
        self._job = job
        self._security = Security.of(job)
        host, _, port = server.removeprefix("tcp://").rpartition(":")
        self._addresses: dict[str, Address] = {
            "scheduler": (job.scheduler_host, job.scheduler_port),
            SERVER: (host, int(port)),
        }
        self._greeting = f"{name} {server}".encode()  # the first message of a connection to a server
        self._random = Random(seed)
        # Few values are wild, because a connection ends with its first invalid message.
        self._control = MessageSource(get_args(FromProcess), seed, wild=0.02)
        self._data = MessageSource(get_args(Request), seed + 1, wild=0.02)
        self._idle: list[Channel] = []
        self.counts = Counter({"messages": 0, "connections": 0, "closed": 0, "strangers": 0})
        self.answers: Counter[str] = Counter()

    def run(self, until: int) -> None:
        """Send messages until `until` have been sent in total."""
        while self.counts["messages"] < until:
            target = self._random.choice(list(self._addresses))
            address = self._addresses[target]
            chance = self._random.random()
            if chance < 0.02:
                self._be_stranger(address)
            elif chance < 0.04:
                self._be_idle(address)
            elif target == SERVER:
                self._send(address, *self._data_burst(), self._data_end)
            else:
                self._send(address, *self._control_burst(), self._control_end)

    def close(self) -> None:
        """Close the connections that were left open."""
        for channel in self._idle:
            channel.close()

    def _send(self, address: Address, data: bytes, count: int, is_answered: Callable[[Channel], bool]) -> None:
        """Send some messages and a last one that is always answered. Wait for that answer or the end."""
        self.counts["messages"] += count
        self.counts["connections"] += 1
        with closing(connect(address, self._security, ANSWER_S)) as channel:
            try:
                send_all(channel, data, ANSWER_S)
                answered = is_answered(channel)
            except (ConnectionError, ConnectionBroken):
                answered = False
            self.counts["closed"] += not answered

    def _bodies(self, source: MessageSource) -> list[bytes]:
        """Return well-formed messages and, in half of the cases, a damaged one as the last."""
        bodies = [source.well_formed() for _ in range(self._random.randrange(1, 20))]
        return bodies + [source.damaged()] * self._random.randrange(2)

    def _control_burst(self) -> tuple[bytes, int]:
        bodies = self._bodies(self._control)
        frames = b"".join(struct.pack("!I", len(body)) + body for body in bodies)
        return frames + frame(Register("nobody", None, "", 0, "")), len(bodies)

    def _control_end(self, channel: Channel) -> bool:
        reader = FrameReader(decode_control)
        wanted = "a process of role 'nobody' cannot register; only workers and servers can"
        buffer = memoryview(bytearray(65536))
        while count := _receive(channel, channel.recv_into, buffer):
            for message in reader.feed(buffer[:count]):
                self.answers[type(message).__name__] += 1
                if isinstance(message, Refused) and message.reason == wanted:
                    return True
        return False

    def _data_burst(self) -> tuple[bytes, int]:
        assert self._job.rank is not None
        configure = Configure(1, self._job.rank, "dist_async", None, None, "share", OWN_STORE)
        bodies = self._bodies(self._data)
        messages = [[self._greeting], [encode(configure)]]
        messages += [[body, *(self._data.frames() if self._random.random() < 0.1 else ())] for body in bodies]
        messages.append([encode(Ask(END_ID, END_ID))])
        return b"".join(map(_data_message, messages)), len(bodies)

    def _data_end(self, channel: Channel) -> bool:
        reader = MessageReader()
        while (frames := _receive(channel, lambda into: reader.read(into, None), channel.recv_into)) is not None:
            answer = decode_response(frames[0])
            self.answers[type(answer).__name__] += 1
            if isinstance(answer, Status) and answer.id == END_ID:
                return True
        return False

    def _be_stranger(self, address: Address) -> None:
        """Send bytes without proving the credentials."""
        self.counts["strangers"] += 1
        greeting = b"echelon\0" + self._random.randbytes(80)
        data = self._random.choice((b"GET / HTTP/1.1\r\n\r\n" * 9, greeting, b"", self._random.randbytes(500)))
        with socket.create_connection(address) as raw, suppress(ConnectionError):
            raw.sendall(data)

    def _be_idle(self, address: Address) -> None:
        """Leave a connection open that has sent a part of a message, or claims a long one."""
        channel = connect(address, self._security, ANSWER_S)
        claims = (struct.pack("!I", 1 << 16), struct.pack("!IQ", 1, 300), struct.pack("!I", 1 << 18) + bytes(100))
        with suppress(ConnectionError):
            send_all(channel, self._random.choice(claims), ANSWER_S)
        self._idle.append(channel)
        if len(self._idle) > IDLE:
            self._idle.pop(0).close()


def _data_message(frames: list[bytes]) -> bytes:
    sizes = [len(one) for one in frames]
    return struct.pack(f"!I{len(sizes)}Q", len(sizes), *sizes) + b"".join(frames)


def _receive(channel: Channel, read: Callable[[Any], Any], into: Any) -> Any:
    """Return what `read` returns once there is something; fail if nothing comes for long."""
    poll = select.poll()
    poll.register(channel.fileno(), select.POLLIN)
    while True:
        try:
            if (found := read(into)) is not None:
                return found
        except BlockingIOError:
            pass
        if not poll.poll(ANSWER_S * 1e3):
            raise AssertionError(f"no answer within {ANSWER_S:g} s from {channel.socket.getpeername()}")


if __name__ == "__main__":
    try:
        main()
    except Malformed as error:
        sys.exit(f"an answer cannot be decoded: {error}")
