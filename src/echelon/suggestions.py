"""The error for an unknown name: the given name, the nearest known name, and all known names."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from echelon.errors import UsageError


def unknown(kind: str, given: str, known: Iterable[str], advice: str = "") -> UsageError:
    """Return the error for an unknown name; the caller raises it."""
    known = tuple(known)
    spellings = {_normalized(name): name for name in known}
    near = get_close_matches(_normalized(given), spellings, n=1, cutoff=0.5)
    guess = f" Did you mean {spellings[near[0]]!r}?" if near else ""
    return UsageError(f"Unknown {kind} {given!r}.{guess} Known: {', '.join(known)}.{advice}")


def _normalized(name: str) -> str:
    return name.lower().replace("_", "-")
