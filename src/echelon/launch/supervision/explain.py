"""What the launcher adds about the process that failed first: its last lines, advice, and who had ended before it."""

from __future__ import annotations

from collections.abc import Iterable

from echelon.launch.supervision.children import Child
from echelon.launch.supervision.last_lines import LastLines, advice_for, is_short_error


def why_failed(child: Child | None, output: LastLines) -> str:
    """Return what the process printed last, and advice. All lines, if the user has not seen them."""
    if child is None or not child.lines:
        return ""
    lines = list(child.lines)
    advice = advice_for(lines)
    if child.command.hidden:
        return "; its last lines:\n" + "\n".join(f"    {line}" for line in lines) + advice
    if child.command.shown or output.ends_with_error(child.name, lines[-1]):
        return advice
    return f"; its last line: {child.last_line}{advice}"


def ended_before(child: Child | None, children: Iterable[Child]) -> str:
    """Name the workers without which the failed one could not continue, and which had ended before it."""
    if child is None or not child.command.needed or not (child.lines and is_short_error(child.lines[-1])):
        return ""
    early = [other for other in children if other.ended_before_failure]
    return "".join(f"; {other.name} ({other.process.where}) had exited before, with status 0" for other in early)
