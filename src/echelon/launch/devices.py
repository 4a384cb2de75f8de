"""One process a device: a worker with several starts its command once for each of them, and looks on.

Device 0 speaks for all: its lines are printed as they are. What the others say is kept, and their last lines are shown
if they fail. One that fails ends the others, and the error names it. The devices of a worker meet at a port of this
machine, whose socket device 0 inherits.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

from echelon.environment import Job
from echelon.errors import UsageError
from echelon.launch.supervise import Command, Line, Supervisor
from echelon.system import usable_cores

FIRST = "device 0"


def print_first(name: str, text: str) -> None:
    """Device 0's line, as it is."""
    if name == FIRST:
        print(text, flush=True)


def run_devices(command: Sequence[str], num_devices: int, on_line: Line = print_first) -> int:
    """Run `command` for every device of this worker; returns the first failing exit status, or 0."""
    if num_devices < 1:
        raise UsageError(f"a worker needs at least one device, not {num_devices}")
    job = Job.from_environment()
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        listener.set_inheritable(True)
        commands = [_command(command, job, index, num_devices, listener) for index in range(num_devices)]
        # Once device 0 has the socket, this copy would only let others knock at a door that nobody opens any more.
        return Supervisor(on_line, on_tick=listener.close).run(commands)


def parse_devices(gpus: str | None, devices: str | None) -> list[str]:
    """`--gpus 0,2`, or `--devices cpu:4` or `cuda:0,cuda:1`; with neither, one CPU."""
    if gpus and devices:
        raise UsageError(f"--gpus {gpus} and --devices {devices} say the same thing twice: give one of them")
    if gpus:
        return _cuda([_number(word, f"--gpus {gpus}", "0,2,5") for word in gpus.split(",")], f"--gpus {gpus}")
    words = [word.strip() for word in (devices or "cpu").split(",")]
    kinds = {word.partition(":")[0] for word in words}
    if kinds == {"cpu"} and len(words) == 1:
        count = _number(words[0].partition(":")[2] or "1", f"--devices {devices}", "cpu:4")
        if count < 1:
            raise UsageError(f"--devices {devices}: a worker needs at least one device")
        return ["cpu"] * count
    if kinds == {"cuda"}:
        told = f"--devices {devices}"
        return _cuda([_number(word.partition(":")[2] or "0", told, "cuda:0,cuda:1") for word in words], told)
    raise UsageError(f"--devices {devices!r} is neither cpu:COUNT nor a list like cuda:0,cuda:1")


def _cuda(ids: Sequence[int], told: str) -> list[str]:
    doubled = next((number for number in ids if ids.count(number) > 1), None)
    if doubled is not None:
        raise UsageError(f"{told} names GPU {doubled} twice; a GPU has one process")
    from torch.cuda import device_count  # not before it is known that GPUs are wanted: torch takes seconds

    there = device_count()
    missing = next((number for number in ids if number >= there), None)
    if missing is not None:
        have = f"has {there} (0 to {there - 1})" if there else "has none that torch can use"
        raise UsageError(
            f"{told} asks for GPU {missing}, but this machine {have}; name those, or leave it out for the CPU"
        )
    return [f"cuda:{number}" for number in ids]


def _number(word: str, told: str, example: str) -> int:
    if not word.strip().isdecimal():
        raise UsageError(f"{told}: {word!r} is not a device number; write for example {example}")
    return int(word)


def _command(command: Sequence[str], job: Job, index: int, num_devices: int, listener: socket.socket) -> Command:
    environment = {
        "ECHELON_DEVICE_INDEX": str(index),
        "ECHELON_NUM_DEVICES": str(num_devices),
        "ECHELON_DEVICE_PORT": str(listener.getsockname()[1]),
        **threads_and_interface(job, num_devices, one_machine=job.num_workers == 1),
    }
    fds: list[int] = []
    if index == 0:
        environment["ECHELON_DEVICE_FD"] = str(listener.fileno())
        fds = [listener.fileno(), *([job.listen_fd] if job.listen_fd is not None else [])]
    name = f"device {index}"
    shown = name == FIRST
    return Command(name, command, environment, essential=False, pass_fds=tuple(fds), needed=True, shown=shown)


def threads_and_interface(job: Job, sharing: int, *, one_machine: bool) -> dict[str, str]:
    """What libraries want to know: how many share the cores, and by which interface processes reach each other."""
    found: dict[str, str] = {}
    if "OMP_NUM_THREADS" not in os.environ:
        # Processes share this machine's cores; torch would otherwise start a thread a core in each of them.
        found["OMP_NUM_THREADS"] = str(max(1, usable_cores() // sharing))
    interface = job.interface or ("lo" if one_machine else None)
    if interface is not None:
        found["GLOO_SOCKET_IFNAME"] = interface
    if job.interface is not None:
        found["NCCL_SOCKET_IFNAME"] = job.interface
    return found
