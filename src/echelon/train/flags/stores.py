"""The `--kv-store` flag: one line about each store for the help, and the store of a job whose user named none."""

from __future__ import annotations

from echelon.schemes.stores import STORES, StoreKind, Use, store_kind

DEFAULT_OF_JOBS = "dist_sync"

_SCHEMES = {
    "BSP": "every step waits for all",
    "ASP": "nobody waits",
    "SSP": "a worker waits when it is --staleness steps ahead",
    "GSP": "the workers of a group wait for each other",
}


def store_lines() -> list[str]:
    """Return two columns: each store's name, and what it does."""
    width = max(map(len, STORES)) + 2
    return [f"{name:<{width}}{describe_store(kind)}" for name, kind in STORES.items()]


def describe_store(kind: StoreKind) -> str:
    """Return what a store does, and the flags it needs, as one line."""
    if not kind.spans_workers:
        who = "devices of one worker"
        who += ", each updates a part of the weights" if kind.sharded else ""
    elif kind.collective:
        who = "devices of all workers, without servers"
    else:
        who = "workers, through servers" + (" or, with -s 0, without" if kind.servers is Use.OPTIONAL else "")
    flags = {"--staleness": kind.staleness, "--groups": kind.groups}
    needs = [f"needs {flag}" for flag, use in flags.items() if use is Use.REQUIRED]
    takes = [f"{flag} is optional" for flag, use in flags.items() if use is Use.OPTIONAL]
    return "; ".join([f"{who}: {_SCHEMES[kind.scheme]} ({kind.scheme})", *needs, *takes])


def choose_store(name: str, *, named: bool, num_workers: int, wants_servers: bool = False) -> tuple[str, str]:
    """Return the store of a run and, if it is not `name`, the reason. `named`: the user gave `--kv-store`.

    A script's default is a store of one worker. In a job of several workers each of them would train a model of its
    own. The default therefore becomes dist_sync there, and where the user asked for servers. A store that the user
    named is not changed; `kvstore.create` warns about one that does not synchronize the workers.
    """
    if named or store_kind(name).spans_workers or (num_workers == 1 and not wants_servers):
        return name, ""
    instead = f"{num_workers} independent models" if num_workers > 1 else "a model without the servers"
    return DEFAULT_OF_JOBS, f"using --kv-store {DEFAULT_OF_JOBS}: the default, {name}, would train {instead}"
