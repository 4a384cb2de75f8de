"""The driver of a job on Ray: places one actor per process, and passes on bytes. `python -m echelon.launch.ray.driver`.

It is a process of its own, because Ray prints messages of the cluster to its driver's standard output, installs signal
handlers, and ends its driver when the cluster is lost. The launcher writes a `Placement` to its standard input, and
keeps that open: when it ends, so do the actors, and a cluster that the driver has started. Events go to the standard
output. The arguments are the numbers of inherited sockets, one per actor, whose other ends the launcher has.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import psutil
import ray
from ray.exceptions import ActorUnavailableError, RayError
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from echelon.environment import variable
from echelon.launch.ray.actor import AgentActor
from echelon.launch.ray.placement import (
    ActorPlace,
    Connected,
    Event,
    Failed,
    Lost,
    Placed,
    Placement,
    Waiting,
    decode_placement,
    encode,
)
from echelon.launch.supervision.processes import READ_BYTES
from echelon.system import usable_cores

LOCAL = "local"  # Ray's word for a cluster of this machine that the driver starts
RUNNING = "auto"  # Ray's word for one that runs on this machine already
CONNECT_S = 10.0
OBJECT_STORE_BYTES = 80 << 20  # of such a cluster, near Ray's minimum: a job does not use Ray's objects
WAITING_S = 5.0  # until the user is told what the job waits for
POLL_S = 0.5


class CannotPlace(Exception):
    """The cluster cannot be reached, or has no room for the job."""


class Driver:
    """Places the actors of one job and passes bytes between them and the launcher."""

    def __init__(self, placement: Placement, sockets: Sequence[socket.socket], events: int) -> None:
        self._placement = placement
        self._sockets = sockets
        self._events = events

    async def run(self) -> None:
        """Run the job until all its actors or the launcher have ended."""
        launcher = asyncio.create_task(_end_of_input())
        job = asyncio.create_task(self._run_job())
        await asyncio.wait({launcher, job}, return_when=asyncio.FIRST_COMPLETED)
        if not (job.done() or ray.is_initialized()):
            _kill_own_cluster()
            os._exit(1)  # Ray may try to reach a cluster for minutes, and cannot be interrupted
        job.cancel()
        try:
            await job
        except asyncio.CancelledError:
            pass
        except CannotPlace as error:
            self._report(Failed(str(error)))

    def _report(self, event: Event) -> None:
        """Send an event to the launcher. A launcher that has ended needs none."""
        try:
            os.write(self._events, encode(event))
        except OSError:
            pass

    async def _run_job(self) -> None:
        context = await asyncio.to_thread(_join_cluster, self._placement)
        self._report(Connected(f"http://{context.dashboard_url}" if context.dashboard_url else ""))
        group = await self._reserve()
        actors = zip(self._placement.actors, self._sockets, strict=True)
        await asyncio.gather(*(self._serve(place, own, group) for place, own in actors))

    async def _reserve(self) -> PlacementGroup:
        """Return the placement group with all bundles of the job, when Ray has reserved it."""
        wanted = self._placement
        bundles = f"{len(wanted.bundles)} bundles ({', '.join(wanted.describe_bundles())}; {wanted.strategy})"
        group = placement_group(wanted.bundles, strategy=wanted.strategy, name=wanted.name)
        began, told = time.monotonic(), False
        while not await asyncio.to_thread(group.wait, POLL_S):
            waited = time.monotonic() - began
            if waited > wanted.timeout_s:
                raise CannotPlace(f"Ray did not reserve {bundles} within {wanted.timeout_s:g} s: {_cluster_has()}")
            if waited > WAITING_S and not told:
                told = True
                self._report(Waiting(f"Ray has not reserved {bundles} yet: {_cluster_has()}"))
        return group

    async def _serve(self, place: ActorPlace, own: socket.socket, group: PlacementGroup) -> None:
        """Create the actor of a process, and pass on bytes until it or the launcher ends."""
        actor = _create_actor(place, group)
        reader, writer = await asyncio.open_connection(sock=own)
        sending = asyncio.create_task(_pass_input(reader, actor))
        try:
            self._report(Placed(place.name, await actor.address.remote()))
            while data := await actor.read.remote():
                writer.write(data)
                await writer.drain()
        except RayError as error:
            if not reader.at_eof():  # the launcher has not ended this actor
                self._report(Lost(place.name, _cause(error)))
        except ConnectionError:
            pass  # the launcher has ended
        finally:
            sending.cancel()
            writer.close()


def _create_actor(place: ActorPlace, group: PlacementGroup) -> Any:
    options = {
        "name": place.name,
        "num_cpus": place.cpus,
        "num_gpus": place.gpus,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=place.bundle),
    }
    return ray.remote(max_concurrency=2)(AgentActor).options(**options).remote(place.name)


async def _end_of_input() -> None:
    """Wait until the launcher has closed the standard input."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    await reader.read()


async def _pass_input(reader: asyncio.StreamReader, actor: Any) -> None:
    """Pass bytes of the launcher to an actor. When the launcher closes the connection, end the actor."""
    try:
        while data := await reader.read(READ_BYTES):
            await actor.write.remote(data)
        ray.kill(actor)
    except (RayError, ConnectionError):
        pass  # reading from the actor fails, too


def _cause(error: RayError) -> str:
    """Return in one line why Ray has lost an actor."""
    if isinstance(error, ActorUnavailableError):
        return "its node does not answer any more"
    lines = [line for line in str(error).splitlines() if line.strip() and not line.startswith(("\t", " "))]
    return _one_line(" ".join(lines[1:] or lines))


def _join_cluster(placement: Placement) -> Any:
    """Join a cluster, or start one on this machine if none is named and none runs. Return Ray's context."""
    address = placement.address or variable("RAY_ADDRESS") or None
    options: dict[str, Any] = {"namespace": placement.name, "log_to_driver": False, "logging_level": "ERROR"}
    if placement.upload is not None:
        options["runtime_env"] = {"working_dir": placement.upload}
    try:
        if address is not None and address != LOCAL:
            _check_answers(address)
            return ray.init(address, **options)
        if address is None:
            try:
                return ray.init(RUNNING, **options)
            except ConnectionError:
                pass  # none runs
        num_cpus = max(usable_cores(), sum(bundle["CPU"] for bundle in placement.bundles))
        return ray.init(LOCAL, num_cpus=num_cpus, object_store_memory=OBJECT_STORE_BYTES, **options)
    except (RuntimeError, ValueError, OverflowError, OSError) as error:
        where = "on this machine" if address in (None, LOCAL) else f"at {address}"
        raise CannotPlace(f"the Ray cluster {where} cannot be used: {_one_line(str(error))}") from error


def _check_answers(address: str) -> None:
    """Raise OSError if nothing listens at an address. Ray itself would try for minutes."""
    host, _, port = address.rpartition("/")[2].rpartition(":")
    if port.isdecimal():  # otherwise Ray says what is wrong with it
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _cluster_has() -> str:
    """Say how many nodes the cluster has, and which of their resources are free."""
    num_nodes = sum(node["Alive"] for node in ray.nodes())
    all_, free = ray.cluster_resources(), ray.available_resources()
    amounts = [f"{free.get(name, 0):g} of {all_.get(name, 0):g} {name}" for name in ("CPU", "GPU")]
    return f"the cluster has {num_nodes} nodes, and {' and '.join(amounts)} free"


def main() -> int:
    """Run a driver."""
    events = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # where Ray repeats what its logs say about all nodes of the cluster
    placement = decode_placement(sys.stdin.buffer.readline())
    sockets = [socket.socket(fileno=int(number)) for number in sys.argv[1:]]
    try:
        asyncio.run(Driver(placement, sockets, events).run())
    finally:
        _kill_own_cluster()
        ray.shutdown()
    return 0


def _kill_own_cluster() -> None:
    """Kill a cluster that this driver has started, if there was none.

    Ray ends a driver whose cluster has ended, so this must be done first. Otherwise the agents of a node try for a
    minute to reach a cluster that has ended. Processes whose parents have ended are in the group of this process.
    """
    cluster = psutil.Process().children(recursive=True)
    for process in psutil.process_iter():
        with suppress(ProcessLookupError):
            if process.pid != os.getpid() and os.getpgid(process.pid) == os.getpid():
                cluster.append(process)
    for process in cluster:
        with suppress(psutil.NoSuchProcess):
            process.kill()


if __name__ == "__main__":
    sys.exit(main())
