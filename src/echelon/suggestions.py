"""One sentence for every name that is not one of ours: what was given, the nearest known name, and all of them."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from echelon.errors import UsageError


def unknown(kind: str, given: str, known: Iterable[str], advice: str = "") -> UsageError:
    """The error for an unknown name, to be raised by the caller."""
    known = tuple(known)
    near = get_close_matches(given.lower().replace("_", "-"), known, n=1, cutoff=0.5)
    guess = f" Did you mean {near[0]!r}?" if near else ""
    return UsageError(f"Unknown {kind} {given!r}.{guess} Known: {', '.join(known)}.{advice}")
