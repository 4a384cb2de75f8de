"""Compiling the step of a run beside its training: captured steps run at once, compiled ones when they are ready.

`CompileBeside` is called after every step. It measures the speed, and starts a process that compiles
(`compile_child`) if the rest of the run is long enough. When that process has ended, the next step is compiled from the
cache, which takes seconds instead of a minute, and captured again. No step is lost or repeated, because only the
kernels change: weights, optimizer, loss scale, running statistics and the position in the data stay where they are.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, suppress
from importlib import import_module
from typing import Protocol

import torch

from echelon.environment import use_compile_cache
from echelon.errors import EchelonError
from echelon.launch.supervision.processes import ChildProcess
from echelon.train.loop.compile_child import CompileRequest, TensorSpec
from echelon.train.recipe.options import TrainOptions
from echelon.train.recipe.plan import ProcessRank
from echelon.train.step.forward import Forward, ForwardInRegions

PAYS_AFTER_S = 240.0  # of the rest of a run: ResNet-50 is ready after 65 s on an H200, and then trains 18 % faster
SWITCH_PAYS_AFTER_S = 60.0  # of the rest of a run: the switch takes 6 to 8 s there
MEASURE_S = 2.0
MEASURE_STEPS = 10
TUNING = 1.25  # the memory in which kernels are tuned, relative to that of the step
SPARE_BYTES = 2 << 30  # for the CUDA context of the process that compiles, and for validation
GIB = 1 << 30


class SwitchableStep(Protocol):
    """What the two kinds of captured steps have in common."""

    @property
    def forward(self) -> Forward:
        """The part that is compiled."""

    @property
    def is_captured(self) -> bool:
        """Whether the next step replays a graph."""

    def use_compiler(self) -> None:
        """Compile the next step and capture it again."""


def why_not_compile(seconds_left: float, needed_bytes: int, free_bytes: int) -> str | None:
    """Return why a run does not compile beside its training, or None if it does."""
    if seconds_left < PAYS_AFTER_S:
        return f"about {seconds_left:.0f} s of training are left, and compiling pays off after {PAYS_AFTER_S:.0f} s"
    if free_bytes < needed_bytes:
        return (
            f"compiling beside the training needs {needed_bytes / GIB:.1f} GiB of GPU memory, and "
            f"{free_bytes / GIB:.1f} GiB are free (--engine compile compiles before the first step instead)"
        )
    return None


def request_for(
    forward: Forward, options: TrainOptions, place: ProcessRank, num_classes: int, image_shape: tuple[int, int, int]
) -> CompileRequest:
    """Describe the step of a run, whose first batch has been read."""
    batch, device = forward.input.buffer, forward.forward_pass.precision.device
    return CompileRequest(
        options,
        place,
        device,
        num_classes,
        image_shape,
        forward.forward_pass.batch_size,
        forward.forward_pass.metrics,
        in_regions=isinstance(forward, ForwardInRegions),
        buffer=(TensorSpec.of(batch[0]), TensorSpec.of(batch[1])) if batch is not None else None,
        num_threads=torch.get_num_threads(),
        # What the captured step holds. The peak would include the workspaces that were tried for convolutions.
        memory_limit=round(TUNING * torch.cuda.memory_reserved(device)) if device.type == "cuda" else None,
    )


class StepRate:
    """Measures steps per second. What happens between `pause` and the next step does not count."""

    def __init__(self, synchronize: Callable[[], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._synchronize = synchronize
        self._clock = clock
        self._steps, self._seconds = 0, 0.0
        self._began: float | None = None
        self._since = 0  # steps since then

    def count_step(self) -> float | None:
        """Count a step; returns the rate when it has been measured long enough."""
        if self._began is None:
            self._synchronize()
            self._began = self._clock()
            return None
        self._since += 1
        enough = self._seconds + self._clock() - self._began >= MEASURE_S
        if not enough or self._steps + self._since < MEASURE_STEPS:
            return None
        self.pause()
        return self._steps / self._seconds

    def pause(self) -> None:
        """Stop the clock until the next step has been made."""
        if self._began is not None:
            self._synchronize()
            self._seconds += self._clock() - self._began
            self._steps += self._since
            self._began, self._since = None, 0


class CompileBeside:
    """Switches a step to compiled kernels during the run. Use it as a context manager, which ends the child."""

    def __init__(
        self,
        step: SwitchableStep,
        make_request: Callable[[], CompileRequest],
        say: Callable[[str], None],
        num_samples: int,
    ) -> None:
        """`make_request` is called after the first steps; `num_samples` is the size of a step, for the log."""
        self._step = step
        self._make_request = make_request
        self._say = say
        self._num_samples = num_samples
        self._device = step.forward.forward_pass.precision.device
        self._child: CompileProcess | None = None
        self._rate: StepRate | None = None
        self._num_steps = self._steps_left = 0
        self._phases = self._run()

    def __enter__(self) -> CompileBeside:
        return self

    def __exit__(self, *_: object) -> None:
        if self._child is not None:
            self._child.close()

    def after_step(self, num_steps: int, steps_left: int) -> None:
        """Count a step. `num_steps` have been made since the beginning of the run."""
        self._num_steps, self._steps_left = num_steps, steps_left
        next(self._phases, None)

    def pause(self) -> None:
        """Exclude what follows, until the next step, from the measured speed."""
        if self._rate is not None:
            self._rate.pause()

    def _run(self) -> Generator[None]:
        """Measure, compile, measure, switch, measure. Advances by one after every step."""
        while not self._step.is_captured:
            yield
        rate = yield from self._measure()
        request = self._make_request()
        needed, free = self._memory(request)
        if (obstacle := why_not_compile(self._steps_left / rate, needed, free)) is not None:
            self._say(f"not compiled: {obstacle}")
            return
        self._say(f"compiling the step beside the training; the kernels are cached in {use_compile_cache()}")
        try:
            self._child = child = CompileProcess(request)
        except (OSError, EchelonError) as error:
            self._say(f"not compiled: {error}")
            return
        while (failure := child.poll()) is None:
            yield
        if failure:
            self._say(f"not compiled: {failure}")
            return
        before = yield from self._measure()
        if self._steps_left / before < SWITCH_PAYS_AFTER_S:
            self._say(f"not switched to the compiled step: about {self._steps_left / before:.0f} s are left")
            return
        yield from self._switch(child.seconds, before)

    def _switch(self, compile_s: float, before: float) -> Generator[None]:
        self._say(f"switching to the compiled step, which was ready after {compile_s:.0f} s …")
        first, began = self._num_steps + 1, time.monotonic()
        self._step.use_compiler()
        while not self._step.is_captured:
            yield
        if not self._step.forward.compiled:
            return  # the warning of the step says why
        took_s = time.monotonic() - began
        after = yield from self._measure()
        self._say(
            f"engine compiled, then captured, from step {first} on ({took_s:.1f} s for the switch): "
            f"{before * self._num_samples:,.0f} samples/s before, {after * self._num_samples:,.0f} after"
        )

    def _measure(self) -> Generator[None, None, float]:
        """Return the steps per second of the next few steps."""
        rate = self._rate = StepRate(self._synchronize)
        while (measured := rate.count_step()) is None:
            yield
        self._rate = None
        return measured

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _memory(self, request: CompileRequest) -> tuple[int, int]:
        """Return the GPU memory that compiling needs and that is free, in bytes."""
        if request.memory_limit is None:
            return 0, 0
        return request.memory_limit + SPARE_BYTES, torch.cuda.mem_get_info(self._device)[0]


class CompileProcess:
    """A process that compiles one step. It ends with this one, with all the processes that it has started."""

    def __init__(self, request: CompileRequest) -> None:
        self._began = time.monotonic()
        self.seconds = 0.0
        arguments = [sys.executable, "-m", CompileRequest.__module__]
        with ExitStack() as resources:
            self._output = output = resources.enter_context(tempfile.TemporaryFile())
            process = ChildProcess("the compiler's process", arguments, {}, stdin=subprocess.PIPE, stdout=output)
            resources.callback(process.close)
            assert process.stdin is not None
            process.stdin.write(pickle.dumps(request))  # smaller than a pipe, so this does not block
            process.stdin.close()
            self._process, self._resources = process, resources.pop_all()
        self._import = threading.Thread(target=_import_inductor, name="import-inductor", daemon=True)
        self._import.start()

    def poll(self) -> str | None:
        """Return None while it runs, then why it failed, or an empty string if it did not."""
        code = self._process.exit_code()
        if code is None or self._import.is_alive():
            return None
        self.seconds = time.monotonic() - self._began
        self._output.seek(0)
        lines = self._output.read().decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "no output")
        self.close()
        return "" if code == 0 else f"the compiler's process ended with status {code}: {last}"

    def close(self) -> None:
        """Kill the process and what it has started. A second call does nothing."""
        self._resources.close()
        self._import.join()


def _import_inductor() -> None:
    """Import Inductor, which takes seconds, before the switch needs it. There, an error would be logged."""
    with suppress(Exception):
        import_module("torch._inductor.compile_fx")
