"""One process per device: a worker with several devices starts its command once for each of them and supervises them.

The output of device 0 is printed unchanged. The output of the others is kept, and their last lines are printed if they
fail. When one device fails, the others are stopped and the error names it. The devices of a worker find each other at a
port of this machine, whose listening socket device 0 inherits.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Mapping, Sequence

from echelon.environment import Job, sleeping_threads, user_threads
from echelon.errors import UsageError
from echelon.launch.supervision.children import Command, OnLine
from echelon.launch.supervision.supervise import Supervisor
from echelon.system import usable_cores
from echelon.transport.listening import LOOPBACK, listen

FIRST = "device 0"


def print_unchanged(name: str, text: str) -> None:
    """Print a line of device 0, whose lines are the worker's."""
    print(text, flush=True)


def run_devices(command: Sequence[str], num_devices: int, on_line: OnLine = print_unchanged) -> int:
    """Run `command` for every device of this worker, and return the first failing exit status, or 0."""
    if num_devices < 1:
        raise UsageError(f"a worker needs at least one device, not {num_devices}")
    if threading.current_thread() is not threading.main_thread():
        raise UsageError(
            f"{num_devices} devices need a process each, and this worker is a thread: use --launcher local"
        )
    job = Job.from_environment()
    with listen(LOOPBACK) as listener:
        commands = [_command(command, job, index, num_devices, listener) for index in range(num_devices)]
        return Supervisor(on_line, on_tick=listener.close).run(commands)


def parse_devices(gpus: str | None, devices: str | None) -> list[str]:
    """Return the devices of `--gpus 0,2`, `--devices cpu:4` or `--devices cuda:0,cuda:1`; without either, one CPU.

    A GPU that is named twice gets two processes, which share it.
    """
    if gpus and devices:
        raise UsageError(f"--gpus {gpus} and --devices {devices} contradict each other; give only one of them")
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
        flag = f"--devices {devices}"
        return _cuda([_number(word.partition(":")[2] or "0", flag, "cuda:0,cuda:1") for word in words], flag)
    meant = f"; write {devices.replace('gpu', 'cuda')}" if devices and kinds == {"gpu"} else ""
    raise UsageError(f"--devices {devices!r} is neither cpu:COUNT nor a list like cuda:0,cuda:1{meant}")


def _cuda(ids: Sequence[int], flag: str) -> list[str]:
    from torch.cuda import device_count  # only when GPUs are requested, because importing torch takes seconds

    found = device_count()
    missing = next((number for number in ids if number >= found), None)
    if missing is not None:
        have = f"has {found} (0 to {found - 1}); name one of those, or" if found else "has none that torch can use;"
        raise UsageError(f"{flag} asks for GPU {missing}, but this machine {have} omit the flag for the CPU")
    return [f"cuda:{number}" for number in ids]


def _number(word: str, flag: str, example: str) -> int:
    if not word.strip().isdecimal():
        raise UsageError(f"{flag}: {word!r} is not a device number; write for example {example}")
    return int(word)


def _command(command: Sequence[str], job: Job, index: int, num_devices: int, listener: socket.socket) -> Command:
    environment = {
        "ECHELON_DEVICE_INDEX": str(index),
        "ECHELON_NUM_DEVICES": str(num_devices),
        "ECHELON_DEVICE_PORT": str(listener.getsockname()[1]),
        **library_variables(job, job.local_workers or 1, num_devices=num_devices, one_machine=job.num_workers == 1),
    }
    fds: list[int] = []
    if index == 0:
        environment["ECHELON_DEVICE_FD"] = str(listener.fileno())
        fds = [listener.fileno(), *([job.listen_fd] if job.listen_fd is not None else [])]
    name = f"device {index}"
    is_first = name == FIRST
    return Command(
        name,
        command,
        environment,
        essential=False,
        pass_fds=tuple(fds),
        needed=True,
        shown=is_first,
        hidden=not is_first,
    )


def library_variables(
    job: Job, num_workers: int, *, num_devices: int = 1, one_machine: bool, given: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return variables for torch, Gloo and NCCL: threads per process, and the network interface between processes.

    `num_workers` workers with `num_devices` processes each share this machine's cores. By default torch starts one
    thread per core in each process. `given` are the user's own variables, which may set the number of threads.
    """
    variables = sleeping_threads()
    chosen = user_threads() is not None or "OMP_NUM_THREADS" in (given or {})
    if not chosen or job.local_workers is not None:  # not the user's, but a launcher's for whole workers
        variables["OMP_NUM_THREADS"] = str(max(1, usable_cores() // (num_workers * num_devices)))
        variables["ECHELON_LOCAL_WORKERS"] = str(num_workers)
    interface = job.interface or ("lo" if one_machine else None)
    if interface is not None:
        variables["GLOO_SOCKET_IFNAME"] = interface
    if job.interface is not None:
        variables["NCCL_SOCKET_IFNAME"] = job.interface
    return variables
