"""Asking the hosts: a probe on each of them over ssh, all at once, then every pair of hosts in turn."""

from __future__ import annotations

import itertools
import os
import select
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import msgspec

from echelon.cluster.messages import Malformed
from echelon.doctor.diagnose import Examination
from echelon.doctor.messages import Clock, Facts, FromProbe, Inspect, Measure, Measured, Time, ToProbe
from echelon.doctor.probe import facts as own_facts
from echelon.errors import JobError
from echelon.launch.agents.messages import explain
from echelon.launch.agents.streams import Stream
from echelon.launch.hosts import Host
from echelon.launch.plan import Request
from echelon.launch.ssh.launcher import open_stream
from echelon.transport.framing import FrameReader, with_length

PROBE = "echelon.doctor.probe"
START_S = 30.0  # to log in and to answer the first question
ANSWER_S = 15.0  # for every further answer
_decoder: msgspec.msgpack.Decoder[FromProbe] = msgspec.msgpack.Decoder(FromProbe)

Progress = Callable[[str], None]


class Probe:
    """A probe on a host, and the answers that it owes."""

    def __init__(self, host: Host, stream: Stream) -> None:
        self.host, self.name, self._stream = host, host.line, stream
        self._reader = FrameReader(_decoder.decode)

    def ask(self, question: ToProbe) -> None:
        """Send a question."""
        self._stream.write(with_length(msgspec.msgpack.encode(question)))

    def answer(self, deadline: float) -> FromProbe:
        """Wait for the answer to the question. Raises JobError with the cause if none comes in time."""
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise JobError(f"{self.name} did not answer in time; check its load and its network")
            select.select([self._stream], [], [], min(left, 0.2))
            self._stream.flush()
            data = self._stream.read()
            if data == b"":
                raise JobError(self._stream.why_ended())
            try:
                for answer in self._reader.feed(data or b""):
                    return answer
            except Malformed as error:
                raise JobError(explain(error)) from error

    def close(self) -> None:
        """End the probe."""
        self._stream.close()


def examine(request: Request, port: int | None, progress: Progress) -> Examination:
    """Ask all hosts of a request, and measure between every two that can be reached."""
    hosts, interface = request.hosts, request.job.interface
    own, listener = own_facts(Inspect(None, socket.gethostname(), [], None, None))
    if listener is not None:
        listener.close()
    unreachable: dict[str, str] = {}
    with _probes(request, hosts) as probes:
        progress(f"logging in to {len(hosts)} hosts")
        names = [host.name for host in hosts]
        folder = None if request.sync_dst_dir else os.getcwd()
        for probe in probes:
            needed = port if probe.host is hosts[0] else None
            probe.ask(Inspect(interface, probe.host.name, names, needed, folder))
        facts: dict[str, Facts] = {}
        skews: dict[str, float] = {}
        deadline = time.monotonic() + START_S
        for probe in probes:
            try:
                found = probe.answer(deadline)
                assert isinstance(found, Facts)
                skews[probe.name] = _skew(probe)
                facts[probe.name] = found
            except JobError as error:
                unreachable[probe.name] = str(error)
        living = [probe for probe in probes if probe.name in facts]
        pairs = dict(_measure_pairs(living, facts, progress))
    return Examination(own, unreachable, facts, skews, pairs, interface, port)


@contextmanager
def _probes(request: Request, hosts: Sequence[Host]) -> Iterator[list[Probe]]:
    probes = [Probe(host, open_stream(request, host, f"the probe of {host}", PROBE)) for host in hosts]
    try:
        yield probes
    finally:
        for probe in probes:
            probe.close()


def _skew(probe: Probe) -> float:
    """Return by how many seconds the host's clock is ahead, from the shortest of a few round trips."""
    best = (float("inf"), 0.0)
    for _ in range(3):
        before = time.time()
        probe.ask(Clock())
        answer = probe.answer(time.monotonic() + ANSWER_S)
        after = time.time()
        assert isinstance(answer, Time)
        best = min(best, (after - before, answer.seconds - (before + after) / 2))
    return best[1]


def _measure_pairs(
    probes: Sequence[Probe], facts: dict[str, Facts], progress: Progress
) -> Iterator[tuple[tuple[str, str], Measured]]:
    """Measure one pair after the other, so that they do not share a link."""
    for source, target in itertools.permutations(probes, 2):
        other = facts[target.name]
        if not other.listening:
            continue
        progress(f"measuring from {source.name} to {target.name}")
        source.ask(Measure(other.address, other.listening, other.token))
        try:
            answer = source.answer(time.monotonic() + ANSWER_S)
        except JobError as error:
            answer = Measured(problem=str(error))
        assert isinstance(answer, Measured)
        yield (source.name, target.name), answer
