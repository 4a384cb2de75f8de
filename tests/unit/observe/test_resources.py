"""The resource monitor samples real processes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import types

import psutil
import pytest

from echelon.observe.resources import Gpu, GpuReader, ResourceMonitor, ResourceReader, Sample, as_series

BUSY = "import sys\nkept = bytearray(64 << 20)\nprint('ready', flush=True)\nwhile True: pass"


def test_the_memory_and_cpu_of_children_are_counted() -> None:
    with subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
            reader = ResourceReader(lambda: [psutil.Process(child.pid)])
            reader.read()
            before = psutil.Process(child.pid).cpu_times().user
            while psutil.Process(child.pid).cpu_times().user < before + 0.1:
                os.sched_yield()
            sample = reader.read()
        finally:
            child.kill()
    assert sample.num_processes == 1
    assert sample.resident_mib > 64
    assert sample.virtual_mib >= sample.resident_mib
    assert sample.cpu_percent > 0


def test_a_process_that_has_ended_is_left_out() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    process = psutil.Process(child.pid)
    child.wait()
    sample = ResourceReader(lambda: [process]).read()
    assert (sample.num_processes, sample.resident_mib) == (0, 0)


def test_bytes_of_the_network_are_counted_since_the_start() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sender:
        receiver, _ = server.accept()
        with receiver:
            reader = ResourceReader(list)
            sent = threading.Thread(target=sender.sendall, args=(bytes(8 << 20),))
            sent.start()
            remaining = 8 << 20
            while remaining:
                remaining -= len(receiver.recv(min(remaining, 1 << 20)))
            sent.join()
    sample = reader.read()
    assert sample.sent_mib >= 8
    assert sample.received_mib >= 8


def test_the_monitor_samples_until_it_is_left() -> None:
    with ResourceMonitor(0.001, ResourceReader(list)) as monitor:
        while len(monitor.samples) < 3:
            os.sched_yield()
    number = len(monitor.samples)
    assert number >= 3
    assert [sample.time for sample in monitor.samples] == sorted(sample.time for sample in monitor.samples)
    assert not any(thread.name == "echelon-resources" for thread in threading.enumerate())


def sample(gpus: tuple[Gpu, ...]) -> Sample:
    return Sample(1.0, 2, 150.0, 10.0, 20.0, 5.0, 0.1, 3.0, 4.0, gpus)


def test_samples_become_one_list_per_field() -> None:
    assert as_series([sample(()), sample(())])["cpu_percent"] == [150.0, 150.0]
    assert not any(name.startswith("gpu") for name in as_series([sample(())]))
    series = as_series([sample((Gpu(80.0, 1000.0, 300.5), Gpu(0.0, 10.0, None)))])
    assert series["gpu_power_w"] == [[300.5, None]]
    assert series["gpu_utilisation_percent"] == [[80.0, 0.0]]


@pytest.mark.parametrize("series", [as_series([])])
def test_no_samples_are_empty_lists(series: dict[str, list[object]]) -> None:
    assert series["time"] == []


class Driver(types.ModuleType):
    """A stand-in for nvidia-ml-py, because test machines have no GPU.

    Of three GPUs, one reports no power, and one, which is a part of a GPU, does not report how busy it is.
    """

    class NVMLError(Exception):
        """The base class of nvidia-ml-py's errors."""

    def __init__(self, *, found: bool) -> None:
        super().__init__("pynvml")
        self.found = found

    def nvmlInit(self) -> None:
        if not self.found:
            raise self.NVMLError("Driver Not Loaded")

    def nvmlShutdown(self) -> None:
        self.found = False

    def nvmlDeviceGetCount(self) -> int:
        return 3

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        if handle == 1:
            raise self.NVMLError("Not Supported")
        return 300_500  # milliwatts

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> types.SimpleNamespace:
        if handle == 2:
            raise self.NVMLError("Not Supported")
        return types.SimpleNamespace(gpu=80)

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> types.SimpleNamespace:
        return types.SimpleNamespace(used=3 << 30)


@pytest.mark.parametrize("found", [True, False])
def test_gpus_are_read_where_there_is_a_driver(monkeypatch: pytest.MonkeyPatch, found: bool) -> None:
    driver = Driver(found=found)
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    reader = GpuReader()
    assert reader.read() == ((Gpu(80.0, 3072.0, 300.5), Gpu(80.0, 3072.0, None)) if found else ())
    reader.close()
    assert not driver.found


def test_without_the_library_there_are_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert GpuReader().read() == ()
