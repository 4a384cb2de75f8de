"""What the answers of the hosts mean for a job. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from echelon.doctor.messages import Facts, Measured

MAX_SKEW_S = 1.0
FEW_FILES = 4096
SLOW = 5.0  # times slower than the median of all pairs

Pair = tuple[str, str]


@dataclass(frozen=True)
class Finding:
    """Something that is wrong on a host, and what to do. A job may still run if it is not `fatal`."""

    host: str
    text: str
    advice: str
    fatal: bool = True

    def __str__(self) -> str:
        return f"{'error' if self.fatal else 'warning'}: {self.host}: {self.text}; {self.advice}"


@dataclass(frozen=True)
class Examination:
    """Everything that was found out.

    own          the facts of the machine that runs the doctor
    unreachable  hosts without a probe, and why
    facts, skews of the hosts with a probe; skews are seconds by which a clock is ahead
    pairs        what was measured between hosts
    interface    the interface that the user named; port: one that the job needs on the first host
    """

    own: Facts
    unreachable: Mapping[str, str]
    facts: Mapping[str, Facts]
    skews: Mapping[str, float]
    pairs: Mapping[Pair, Measured]
    interface: str | None = None
    port: int | None = None


def diagnose(found: Examination) -> list[Finding]:
    """Return all findings, the hosts in order."""
    findings = [Finding(host, *_split(why)) for host, why in found.unreachable.items()]
    for host, facts in found.facts.items():
        findings += _of_software(host, facts, found.own)
        findings += _of_network(host, facts, found)
        findings += _of_limits(host, facts, found)
        if abs(skew := found.skews.get(host, 0.0)) > MAX_SKEW_S:
            text = f"its clock is {abs(skew):.1f} s {'ahead of' if skew > 0 else 'behind'} this machine's"
            findings.append(Finding(host, text, "synchronise the clocks, for example with chrony", fatal=False))
    return findings + list(_of_pairs(found.pairs, found.facts))


def _split(why: str) -> tuple[str, str]:
    text, _, advice = why.partition("; ")
    return text, advice or "try it by hand"


def _of_software(host: str, facts: Facts, own: Facts) -> Iterator[Finding]:
    if facts.python.split(".")[:2] != own.python.split(".")[:2]:
        text = f"its Python is {facts.python}, and this machine's {own.python}"
        yield Finding(host, text, "install the same version, or name another one with --ssh-python")
    for name, version in own.versions.items():
        theirs = facts.versions[name]
        if not theirs:
            yield Finding(host, f"its Python has no package {name}", f"install it there: pip install {name}=={version}")
        elif theirs != version:
            text = f"its {name} is {theirs}, and this machine's {version}"
            yield Finding(host, text, f"install the same there: pip install {name}=={version}", fatal=name == "torch")
    if facts.digest != own.digest:
        text = f"its Echelon has other code (digest {facts.digest}) than this machine's (digest {own.digest})"
        yield Finding(host, text, "install the same on both, or copy it with --sync-dst-dir")
    if facts.folder:
        yield Finding(host, facts.folder, "create it there, or let --sync-dst-dir copy this one")


def _of_network(host: str, facts: Facts, found: Examination) -> Iterator[Finding]:
    if facts.problem:
        text, advice = _split(facts.problem)
        yield Finding(host, text, advice)
    elif len(facts.interfaces) > 1 and not found.interface:
        names = ", ".join(f"{name} {address}" for name, address in facts.interfaces)
        text = f"it has {len(facts.interfaces)} addresses ({names}), and the job would use {facts.address}"
        yield Finding(host, text, "name the interface with -i if that is the wrong one", fatal=False)
    if facts.busy:
        text = f"port {found.port} cannot be used there: {facts.busy}"
        yield Finding(host, text, "end the program that has it, or choose another port")


def _of_limits(host: str, facts: Facts, found: Examination) -> Iterator[Finding]:
    if facts.open_files < FEW_FILES:
        text = f"a process may open only {facts.open_files} files there"
        yield Finding(host, text, f"raise the limit (ulimit -Hn) to {FEW_FILES} or more", fatal=False)
    if not facts.memfd:
        text = "it has no shared memory (memfd), so workers and servers of the host copy all data through sockets"
        yield Finding(host, text, "use Linux 3.17 or later without a filter for memfd_create", fatal=False)
    most = max(len(other.gpus) for other in found.facts.values())
    if len(facts.gpus) < most:
        text = f"it has {len(facts.gpus)} GPUs, and other hosts have up to {most}"
        yield Finding(host, text, "check nvidia-smi there, or leave the host out", fatal=False)


def _of_pairs(pairs: Mapping[Pair, Measured], facts: Mapping[str, Facts]) -> Iterator[Finding]:
    rates = [one.bandwidth for one in pairs.values() if not one.problem]
    usual = statistics.median(rates) if rates else 0.0
    for (source, target), one in pairs.items():
        if one.problem:
            text = f"it cannot connect to {target} at {facts[target].address}: {one.problem}"
            yield Finding(source, text, "check the route and the firewall between them, or name an interface with -i")
        elif one.bandwidth * SLOW < usual:
            text = f"it sends {rate(one.bandwidth)} to {target}, where the median of all pairs is {rate(usual)}"
            yield Finding(
                source, text, "check the cable and the interface, or give this host fewer processes", fatal=False
            )


def rate(bytes_per_s: float) -> str:
    """Return bytes per second as text, as in "1.2 GB/s"."""
    return f"{bytes_per_s / 1e9:.2f} GB/s" if bytes_per_s >= 1e9 else f"{bytes_per_s / 1e6:.1f} MB/s"


def table(found: Examination) -> list[str]:
    """Return the hosts and, between every two of them, bandwidth and latency, as lines."""
    lines = [
        f"{host}: Python {facts.python}, torch {facts.versions['torch']}, {facts.cores} cores, "
        f"{facts.memory / 2**30:.1f} GiB free, {len(facts.gpus)} GPUs, address {facts.address or 'unknown'}"
        for host, facts in found.facts.items()
    ]
    return lines + _matrix([*found.facts], found.pairs)


def _matrix(hosts: Sequence[str], pairs: Mapping[Pair, Measured]) -> list[str]:
    if not pairs:
        return []
    cells = [["from \\ to", *hosts]]
    for source in hosts:
        cells.append([source, *(_cell(pairs.get((source, target))) for target in hosts)])
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]


def _cell(measured: Measured | None) -> str:
    if measured is None:
        return "-"
    return "unreachable" if measured.problem else f"{rate(measured.bandwidth)}, {measured.latency * 1e3:.2f} ms"
