"""Resources that the processes of a job use: CPU, memory, bytes of the network, and GPU utilisation and power.

`ResourceMonitor` samples in a thread. CPU and memory are sums over this process's descendants, which are the processes
of a job that it has started. The bytes of the network are those of all interfaces of the machine, because the kernel
does not count them per process. GPUs are read by nvidia-ml-py where it and a driver are installed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from types import TracebackType
from typing import Any, Self

import psutil

MEBIBYTE = 1 << 20


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU at one moment."""

    utilisation_percent: float
    memory_mib: float
    power_w: float | None  # None: the GPU does not report it


@dataclass(frozen=True, slots=True)
class Sample:
    """The resources at one moment. `cpu_percent` is 100 per busy core, since the previous sample."""

    time: float  # Unix seconds
    num_processes: int
    cpu_percent: float
    resident_mib: float
    virtual_mib: float
    shared_mib: float
    memory_percent: float
    sent_mib: float  # by the machine, since the monitor started
    received_mib: float
    gpus: tuple[Gpu, ...] = ()


class GpuReader:
    """Reads the GPUs of this machine by nvidia-ml-py; without it, or without a driver, there are none."""

    def __init__(self) -> None:
        self._library: Any = None
        self._handles: list[Any] = []
        with suppress(ImportError):
            import pynvml

            with suppress(pynvml.NVMLError):
                pynvml.nvmlInit()
                self._library = pynvml
                count = pynvml.nvmlDeviceGetCount()
                self._handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]

    def read(self) -> tuple[Gpu, ...]:
        """Return the GPUs as they are now, except those that do not report how busy they are."""
        found = []
        for handle in self._handles:
            with suppress(self._library.NVMLError):
                found.append(self._read(handle))
        return tuple(found)

    def _read(self, handle: Any) -> Gpu:
        library = self._library
        power: float | None = None
        with suppress(library.NVMLError):
            power = library.nvmlDeviceGetPowerUsage(handle) / 1000
        utilisation = float(library.nvmlDeviceGetUtilizationRates(handle).gpu)
        return Gpu(utilisation, library.nvmlDeviceGetMemoryInfo(handle).used / MEBIBYTE, power)

    def close(self) -> None:
        """End the use of the library."""
        if self._library is not None:
            self._library.nvmlShutdown()
            self._library, self._handles = None, []


class ResourceReader:
    """Takes samples of the processes that `find` returns: by default, the descendants of this one."""

    def __init__(self, find: Callable[[], Sequence[psutil.Process]] | None = None) -> None:
        own = psutil.Process()
        self._find = find or (lambda: own.children(recursive=True))
        self._known: dict[int, psutil.Process] = {}  # kept, because CPU percentages are since the previous sample
        self._gpus = GpuReader()
        self._sent, self._received = _network_bytes()

    def read(self) -> Sample:
        """Take one sample. Processes that end meanwhile are left out."""
        found = {process.pid: process for process in self._find()}
        self._known = {pid: self._known.get(pid, process) for pid, process in found.items()}
        cpu, resident, virtual, shared, share, count = 0.0, 0, 0, 0, 0.0, 0
        for process in self._known.values():
            with suppress(psutil.Error):
                with process.oneshot():
                    memory = process.memory_info()
                    cpu += process.cpu_percent()
                    share += process.memory_percent()
                resident, virtual, shared = resident + memory.rss, virtual + memory.vms, shared + memory.shared
                count += 1
        sent, received = _network_bytes()
        return Sample(
            time=round(time.time(), 3),
            num_processes=count,
            cpu_percent=round(cpu, 1),
            resident_mib=round(resident / MEBIBYTE, 1),
            virtual_mib=round(virtual / MEBIBYTE, 1),
            shared_mib=round(shared / MEBIBYTE, 1),
            memory_percent=round(share, 2),
            sent_mib=round((sent - self._sent) / MEBIBYTE, 3),
            received_mib=round((received - self._received) / MEBIBYTE, 3),
            gpus=self._gpus.read(),
        )

    def close(self) -> None:
        """Stop reading the GPUs."""
        self._gpus.close()


def _network_bytes() -> tuple[int, int]:
    counters = psutil.net_io_counters()
    return (counters.bytes_sent, counters.bytes_recv) if counters else (0, 0)


class ResourceMonitor:
    """Takes a sample every `every_s` seconds in a thread, while it is used as a context."""

    def __init__(self, every_s: float, reader: ResourceReader | None = None) -> None:
        self.samples: list[Sample] = []
        self._every_s = every_s
        self._reader = reader or ResourceReader()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="echelon-resources", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        self._reader.close()

    def _run(self) -> None:
        self._reader.read()  # the first CPU percentages are 0, because there is no earlier sample
        while not self._stop.wait(self._every_s):
            self.samples.append(self._reader.read())


def as_series(samples: Sequence[Sample]) -> dict[str, list[Any]]:
    """Return samples as one list per field; those of GPUs are lists with one number per GPU."""
    names = [field.name for field in fields(Sample) if field.name != "gpus"]
    series: dict[str, list[Any]] = {name: [getattr(sample, name) for sample in samples] for name in names}
    if any(sample.gpus for sample in samples):
        for field in fields(Gpu):
            series[f"gpu_{field.name}"] = [[getattr(gpu, field.name) for gpu in sample.gpus] for sample in samples]
    return series
