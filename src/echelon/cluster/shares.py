"""Readers of the `groups` and `data_sharding` files, in the format that the documents of MXNet-G describe.

`groups` has one group per line. Its members, separated by spaces, are host names, addresses or worker ranks (digits
only). A host that is named once means all its workers; a host named k times means its k workers in rank order.
`data_sharding` has one line per rank: the start and end of its part of the data, as fractions. Together the parts cover
[0, 1] without overlap.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from echelon.errors import UsageError

GROUPS_FILE = "groups"
Groups = str | Path | Sequence[Iterable[int]]  # a groups file, groups as text, or lists of ranks
_TOLERANCE = 1e-9
_INLINE = re.compile(r"[\d\s,/]+")
_INLINE_SHARES = re.compile(r"\s*[\d.e+-]+\s+[\d.e+-]+\s*(/\s*[\d.e+-]+\s+[\d.e+-]+\s*)*")


def find_groups(given: str | None) -> str | None:
    """Return the given groups or, without any, the file `groups` of the working directory, as MXNet-G does."""
    return given or (GROUPS_FILE if Path(GROUPS_FILE).is_file() else None)


def read_groups(given: Groups, hosts: Mapping[int, str]) -> list[list[int]]:
    """Return groups of ranks from a groups file, from text like `0,1/2`, or from lists. `hosts` maps ranks to hosts."""
    if not isinstance(given, str | Path):
        text = "\n".join(" ".join(str(rank) for rank in group) for group in given)
        return [list(group) for group in parse_groups(text, hosts)]
    inline = inline_groups(str(given))
    if inline is not None:
        return [list(group) for group in parse_groups(inline, hosts, f"groups {str(given)!r}")]
    path = Path(given)
    if not path.is_file():
        raise UsageError(f"no groups file {path}; write one group per line, as hosts or ranks")
    return [list(group) for group in parse_groups(read_text(path), hosts, str(path))]


def groups_text(groups: Iterable[Iterable[int]]) -> str:
    """Return groups of ranks as one line, which `read_groups` reads: `0,1/2`."""
    return "/".join(",".join(str(rank) for rank in group) for group in groups)


def read_text(path: Path) -> str:
    """Return the text of a groups or data_sharding file."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not valid UTF-8 (byte {error.start}); save the file as UTF-8") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None


def inline_groups(text: str) -> str | None:
    """Return the text of a groups file for `0 1 2 / 3` or `0,1,2/3`; None if the argument is a file name."""
    if not _INLINE.fullmatch(text) or not text.strip("/, "):
        return None
    return "\n".join(text.replace(",", " ").split("/"))


def parse_groups(text: str, hosts: Mapping[int, str], source: str = "groups") -> tuple[tuple[int, ...], ...]:
    """Return the groups of ranks in a groups file. `hosts` maps the rank of every worker to its host."""
    lines = [(number, line.split()) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not lines:
        raise UsageError(f"{source} contains no groups; write one group per line, hosts or ranks separated by spaces")
    mentions: dict[str, int] = {}
    for _, members in lines:
        for member in members:
            mentions[member] = mentions.get(member, 0) + 1
    free = {host: [rank for rank in sorted(hosts) if hosts[rank] == host] for host in set(hosts.values())}
    groups: list[tuple[int, ...]] = []
    placed: dict[int, int] = {}
    for number, members in lines:
        group: list[int] = []
        for member in members:
            for rank in _ranks(member, hosts, free, mentions, f"{source} line {number}"):
                if rank in placed:
                    raise UsageError(f"{source} line {number}: worker {rank} is already in line {placed[rank]}")
                placed[rank] = number
                group.append(rank)
        groups.append(tuple(sorted(group)))
    left = sorted(set(hosts) - set(placed))
    if left:
        named = ", ".join(f"{rank} ({hosts[rank]})" for rank in left)
        raise UsageError(f"{source}: no group contains worker {named}; every worker must be in one group")
    return tuple(groups)


def _ranks(
    member: str, hosts: Mapping[int, str], free: dict[str, list[int]], mentions: Mapping[str, int], where: str
) -> list[int]:
    if member.isdecimal():
        if int(member) not in hosts:
            raise UsageError(f"{where}: worker {member} does not exist; ranks go from 0 to {len(hosts) - 1}")
        return [int(member)]
    if member not in free:
        known = ", ".join(sorted(set(hosts.values())))
        raise UsageError(f"{where}: no worker runs on {member!r}; the workers' hosts are {known}")
    here = free[member]
    if mentions[member] == 1:
        return here
    if not here:
        raise UsageError(f"{where}: host {member} is named {mentions[member]} times but has fewer workers")
    return [here.pop(0)]


def parse_shares(text: str, num_workers: int, source: str = "data_sharding") -> list[tuple[float, float]]:
    """Return the (start, end) of each rank in a data_sharding file."""
    shares: list[tuple[float, float]] = []
    numbers: list[int] = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            shares.append(_share(line, f"{source} line {number}"))
            numbers.append(number)
    if len(shares) != num_workers:
        raise UsageError(f"{source} has {len(shares)} lines for {num_workers} workers; write one line per worker")
    check_shares(shares, [f"{source} line {number}" for number in numbers])
    return shares


def read_shares(given: str, num_workers: int) -> list[tuple[float, float]]:
    """Return the (start, end) of each rank from a data_sharding file, or from text like `0 0.3/0.3 1`."""
    if _INLINE_SHARES.fullmatch(given):
        return parse_shares(given.replace("/", "\n"), num_workers, f"data sharding {given!r}")
    path = Path(given)
    if not path.is_file():
        raise UsageError(f"--data-allocator 1 needs the file {path} with one line 'start end' per worker")
    return parse_shares(read_text(path), num_workers, str(path))


def shares_text(shares: Iterable[tuple[float, float]]) -> str:
    """Return shares as one line, which `read_shares` reads without a loss."""
    return "/".join(f"{start!r} {end!r}" for start, end in shares)


def _share(line: str, where: str) -> tuple[float, float]:
    try:
        start, end = (float(word) for word in line.split())
    except ValueError:
        raise UsageError(
            f"{where}: {line.strip()!r} is not two numbers; write 'start end', for example '0 0.3'"
        ) from None
    if not 0 <= start < end <= 1:
        raise UsageError(f"{where}: start {start:g} and end {end:g} must satisfy 0 <= start < end <= 1")
    return start, end


def check_shares(shares: Sequence[tuple[float, float]], names: Sequence[str]) -> None:
    """Raise UsageError, with the name of the first wrong share, unless shares cover [0, 1] without overlap."""
    at = 0.0
    order = sorted(range(len(shares)), key=lambda i: shares[i])
    for index in order:
        start, end = shares[index]
        if abs(start - at) > _TOLERANCE:
            fault = "overlaps the share that ends" if start < at else "leaves a gap after the share that ends"
            raise UsageError(f"{names[index]}: the share from {start:g} to {end:g} {fault} at {at:g}")
        at = end
    if abs(at - 1) > _TOLERANCE:
        raise UsageError(f"{names[order[-1]]}: the shares end at {at:g}; they must cover the data up to 1")
