"""One direction of a bad link: packets are limited in rate, delayed and lost, or all lost while the line is cut. Pure.

line = LossyLine(LineQuality(delay_s=0.025, loss=0.01, bytes_per_s=12.5e6), seed=1)
line.put(packet, now)
for packet in line.due(now): ...
"""

from __future__ import annotations

import random
import struct
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass

_TCP = 6
QUEUE_S = 0.125  # a packet that would wait longer for its turn is dropped, as by the full queue of a router


@dataclass(frozen=True, slots=True)
class LineQuality:
    """What a line does to packets. `loss` is the share of packets that are lost; without `bytes_per_s`, no limit."""

    delay_s: float = 0.0
    loss: float = 0.0
    bytes_per_s: float = float("inf")


@dataclass(slots=True)
class Counts:
    """What has happened to the packets of a line."""

    delivered: int = 0
    delivered_bytes: int = 0
    lost: int = 0  # by chance
    overflowed: int = 0  # because more packets came than the rate allows
    cut: int = 0  # while the line was cut
    blocked: int = 0  # of blocked TCP ports

    def as_dict(self) -> dict[str, int]:
        """Return the counts by name."""
        return asdict(self)


class LossyLine:
    """The packets that are on their way in one direction."""

    def __init__(self, quality: LineQuality, seed: int = 0) -> None:
        self._quality = quality
        self._chance = random.Random(seed)
        self._packets: deque[tuple[float, bytes]] = deque()  # with the time of arrival
        self._free_at = 0.0  # when the last packet has left
        self.is_cut = False
        self.blocked_ports: frozenset[int] = frozenset()
        self.counts = Counts()

    def put(self, packet: bytes, now: float) -> None:
        """Let a packet enter, unless it is lost."""
        if self.is_cut:
            self.counts.cut += 1
        elif self.blocked_ports and not self.blocked_ports.isdisjoint(tcp_ports(packet)):
            self.counts.blocked += 1
        elif self._chance.random() < self._quality.loss:
            self.counts.lost += 1
        elif self._free_at - now > QUEUE_S:
            self.counts.overflowed += 1
        else:
            self._free_at = max(now, self._free_at) + len(packet) / self._quality.bytes_per_s
            self._packets.append((self._free_at + self._quality.delay_s, packet))

    def due(self, now: float) -> Iterator[bytes]:
        """Yield and remove the packets that arrive by now. On a cut line, those that were on their way are lost."""
        while self._packets and self._packets[0][0] <= now:
            packet = self._packets.popleft()[1]
            if self.is_cut:
                self.counts.cut += 1
                continue
            self.counts.delivered += 1
            self.counts.delivered_bytes += len(packet)
            yield packet

    def next_at(self) -> float | None:
        """Return when the next packet arrives, or None if none is on its way."""
        return self._packets[0][0] if self._packets else None


def tcp_ports(packet: bytes) -> tuple[int, ...]:
    """Return the ports of sender and receiver of an IPv4 packet of TCP; of other packets none."""
    if len(packet) < 20 or packet[0] >> 4 != 4 or packet[9] != _TCP:
        return ()
    begin = 4 * (packet[0] & 0x0F)
    return struct.unpack_from("!HH", packet, begin) if len(packet) >= begin + 4 else ()
