"""The one error for an unknown name: what was given, the nearest known name, and all known names."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from echelon.errors import UsageError


def unknown_name(kind: str, given: str, known: Iterable[str], advice: str = "") -> UsageError:
    """Return the error for an unknown name, which the caller raises. `advice` is appended after a semicolon."""
    known = tuple(known)
    by_folded = {_fold(name): name for name in known}
    near = get_close_matches(_fold(given), by_folded, n=1, cutoff=0.5)
    choose = f"did you mean {by_folded[near[0]]!r}? Choose" if near else "choose"
    return UsageError(f"unknown {kind} {given!r}; {choose} one of {', '.join(known)}{advice and f'; {advice}'}")


def _fold(name: str) -> str:
    """Ignore case and the difference between `-` and `_`."""
    return name.lower().replace("_", "-")
