"""How many frames, of how many bytes, a request can have at most. Frames beyond that are not received.

The limits follow from the sizes of the keys that a request names. They are not exact: `memory` and `rows` check the
frames that have arrived. Here only memory is at stake, which a server must not take for frames that cannot be right.
"""

from __future__ import annotations

from collections.abc import Iterable

from echelon.cluster.messages import Gather, GiveValues, Init, Offer, PullRows, Push, PutRows, PutStates, Request
from echelon.cluster.placement import ITEM_BYTES, MIN_STRIPE, Layout

BASE_BYTES = 16 << 20  # of any request: enough for its answer to say what is wrong with it
GATHER_BYTES = 4 << 30  # of a part of exchanged values, which no key describes
GIVEN_BYTES = 16 << 30  # of frozen parameters and buffers
_STATES_PER_ENTRY = 4  # times the size of a key: classes keep what they want


def frame_limits(layout: Layout, request: Request) -> tuple[int, int]:
    """Return how many frames a request can have at most, and how many bytes."""
    match request:
        case Push(keys=keys, rows=rows) if rows:
            return 2 * len(keys), BASE_BYTES + 2 * _bytes(layout, keys)  # a row may occur more than once
        case Push(keys=keys):
            return _frames_of(layout, keys)
        case Init(slots=slots) | Offer(slots=slots):
            size = min(sum(slot.padded * ITEM_BYTES.get(slot.spec.dtype, 0) for slot in slots), layout.max_bytes)
            return _frames(len(slots), size)
        case PutRows(key=key) | PullRows(key=key):
            return 1, BASE_BYTES + 8 * _bytes(layout, [key])  # the number of a row has up to eight times its bytes
        case PutStates(entries=entries):
            sizes = _bytes(layout, (entry.key for entry in entries))
            return len(entries), BASE_BYTES + _STATES_PER_ENTRY * sizes
        case Gather():
            return 1, GATHER_BYTES
        case GiveValues():
            return 1 + GIVEN_BYTES // MIN_STRIPE, GIVEN_BYTES
    return 0, 0


def _frames_of(layout: Layout, keys: list[int]) -> tuple[int, int]:
    return _frames(len(keys), _bytes(layout, keys))


def _frames(num_keys: int, num_bytes: int) -> tuple[int, int]:
    """Return the limits of keys: a key has a frame per stripe at most, and one more at each end."""
    return 2 * num_keys + num_bytes // MIN_STRIPE, BASE_BYTES + num_bytes


def _bytes(layout: Layout, keys: Iterable[int]) -> int:
    """Return the bytes of keys on all servers. A key that does not exist has none."""
    found = (layout.slots.get(key) for key in keys)
    return sum(slot.padded * ITEM_BYTES[slot.spec.dtype] for slot in found if slot is not None)
