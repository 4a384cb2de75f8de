"""Compiling beside the training, with a real process that compiles, on the CPU: only the graphs need a GPU."""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.optim import SGD

from echelon import Trainer, models
from echelon.kvstore import KVStore
from echelon.launch.threads.in_process import run
from echelon.train.loop import compile_beside
from echelon.train.loop.compile_beside import CompileBeside, CompileProcess, StepRate, request_for, why_not_compile
from echelon.train.loop.compile_child import CompileRequest
from echelon.train.recipe.options import TrainOptions
from echelon.train.recipe.plan import ProcessRank
from echelon.train.step.captured import StepBody
from echelon.train.step.captured_with_servers import ServerStepBody
from echelon.train.step.eager import ForwardPass
from echelon.train.step.forward import ForwardInRegions, WholeForward
from echelon.train.step.metrics import Metrics
from echelon.train.step.precision import Precision
from echelon.train.trainer.servers.trainer import ServerTrainer

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")

CPU = torch.device("cpu")
BATCH, SHAPE, CLASSES = 8, (1, 8, 8), 10
OPTIONS = TrainOptions(network="mlp", batch_size=BATCH, dtype="float32")
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler on a CPU")


class BodyWithoutGraph:
    """A step as `CapturedStep`, without the graph: it is "captured" as soon as it has made a step."""

    def __init__(self, backend: str = "eager") -> None:
        torch.manual_seed(3)
        self._backend = backend
        self.model: nn.Module = models.build("mlp", num_classes=CLASSES, image_shape=SHAPE)
        self.trainer = Trainer(self.model, SGD(self.model.parameters(), lr=0.1, momentum=0.9))
        forward_pass = ForwardPass(self.model, Precision(CPU, None, ""), Metrics(), BATCH)
        self._body = StepBody(forward_pass, self.trainer, None)
        self.sums = forward_pass.sums
        self.is_captured = False
        generator = torch.Generator().manual_seed(1)
        self._batches = [
            (torch.rand(BATCH, *SHAPE, generator=generator), torch.randint(CLASSES, (BATCH,), generator=generator))
            for _ in range(8)
        ]
        self.num_steps = 0

    @property
    def forward(self) -> WholeForward:
        return self._body.forward

    def use_compiler(self) -> None:
        self.is_captured = False
        self.forward.use(lambda function: torch.compile(function, backend=self._backend))

    def step(self) -> None:
        self.forward.input.copy_in(self._batches[self.num_steps])
        self._body.update(self.forward.run_first(self._body.forward_backward))
        self.is_captured = True
        self.trainer.count(BATCH)
        self.num_steps += 1

    def weights(self) -> Tensor:
        return torch.cat([p.detach().flatten() for p in self.model.parameters()])


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Every run is long enough, the speed is measured over one step, and the cache is empty."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    for name, value in {"PAYS_AFTER_S": 0.0, "SWITCH_PAYS_AFTER_S": 0.0, "MEASURE_S": 0.0, "MEASURE_STEPS": 1}.items():
        monkeypatch.setattr(compile_beside, name, value)
    monkeypatch.setenv("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR", "0")  # set by Inductor, removed after the test
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def requesting(step: BodyWithoutGraph, options: TrainOptions = OPTIONS) -> Callable[[], CompileRequest]:
    return lambda: request_for(step.forward, options, ProcessRank(0, 1), CLASSES, SHAPE)


def wait_for(beside: CompileBeside) -> None:
    """Wait until the compiler's process has ended."""
    assert beside._child is not None
    select.select([beside._child._process.pidfd], [], [])


def switch_in_mid_run(backend: str) -> BodyWithoutGraph:
    """Make four steps, wait for the compiler's process, and make four more; compare with eight plain steps."""
    plain, step = BodyWithoutGraph(), BodyWithoutGraph(backend)
    for _ in range(8):
        plain.step()
    lines: list[str] = []
    with CompileBeside(step, requesting(step), lines.append, BATCH) as beside:
        for _ in range(4):
            step.step()
            beside.after_step(step.num_steps, 100)
        wait_for(beside)
        while not step.forward.compiled:
            beside.after_step(step.num_steps, 100)  # without a step, so that both runs have equally many
        while step.num_steps < 8:
            step.step()
            beside.after_step(step.num_steps, 100)
    assert "compiling the step beside the training" in lines[0]
    assert lines[-1].startswith("engine compiled, then captured, from step 5 on")
    assert torch.allclose(step.weights(), plain.weights(), rtol=1e-4, atol=1e-6)
    assert not torch.allclose(step.weights(), BodyWithoutGraph().weights(), rtol=1e-2), "training changes the weights"
    assert torch.equal(step.sums, plain.sums)
    assert step.trainer.samples_trained == 8 * BATCH
    return step


@pytest.mark.long
@pytest.mark.usefixtures("fast")
def test_the_switch_loses_and_repeats_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")  # for the other process, which has nothing to compile for this
    switch_in_mid_run("aot_eager")


@needs_compiler
@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("fast")
def test_the_run_finds_what_the_other_process_compiled_in_the_cache() -> None:
    switch_in_mid_run("inductor")
    assert_all_from_cache()


@needs_compiler
@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # raised inside torch
@pytest.mark.usefixtures("fast")
def test_a_run_with_servers_finds_its_regions_in_the_cache() -> None:
    def drive(kv: KVStore) -> None:
        model = models.build("mlp", num_classes=CLASSES, image_shape=SHAPE)
        trainer = Trainer(model, SGD(model.parameters(), lr=0.1), kv)
        assert isinstance(trainer, ServerTrainer)
        step = ServerStepBody(ForwardPass(model, Precision(CPU, None, ""), Metrics(), BATCH), trainer)
        step.forward.input.copy_in((torch.rand(BATCH, *SHAPE), torch.zeros(BATCH, dtype=torch.int64)))
        child = CompileProcess(request_for(step.forward, OPTIONS, ProcessRank(0, 1), CLASSES, SHAPE))
        select.select([child._process.pidfd], [], [])
        while (failure := child.poll()) is None:
            pass  # until Inductor is imported
        assert not failure
        step.forward.use(torch.compile)
        step()

    run(drive, "dist_sync", num_workers=1)
    assert_all_from_cache()


def assert_all_from_cache() -> None:
    assert counters["inductor"]["fxgraph_cache_miss"] == 0
    assert counters["aot_autograd"]["autograd_cache_miss"] == 0
    assert counters["aot_autograd"]["autograd_cache_hit"] + counters["inductor"]["fxgraph_cache_hit"] > 0


@pytest.mark.usefixtures("fast")
def test_a_run_whose_compiler_fails_continues_and_says_why() -> None:
    step, lines = BodyWithoutGraph(), list[str]()
    with CompileBeside(step, requesting(step, TrainOptions(network="none-such")), lines.append, BATCH) as beside:
        for _ in range(4):
            step.step()
            beside.after_step(step.num_steps, 100)
        wait_for(beside)
        while len(lines) < 2:
            beside.after_step(step.num_steps, 100)
        step.step()
        beside.after_step(step.num_steps, 100)
    assert not step.forward.compiled
    assert lines[1].startswith("not compiled: the compiler's process ended with status 1: ")
    assert "unknown network 'none-such'" in lines[1]


@pytest.mark.usefixtures("fast")
def test_a_run_whose_compiler_cannot_start_continues_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/none/such")
    step, lines = BodyWithoutGraph(), list[str]()
    with CompileBeside(step, requesting(step), lines.append, BATCH) as beside:
        for _ in range(5):
            step.step()
            beside.after_step(step.num_steps, 100)
    assert lines[-1] == "not compiled: the compiler's process cannot run '/none/such': No such file or directory"
    assert step.num_steps == 5


@pytest.mark.usefixtures("fast")
def test_the_end_of_the_run_ends_the_compiler() -> None:
    """The fixture for leaks finds the process if it is left behind."""
    step, lines = BodyWithoutGraph(), list[str]()
    with CompileBeside(step, requesting(step), lines.append, BATCH) as beside:
        while not lines:
            step.step()
            beside.after_step(step.num_steps, 100)
        child = beside._child
        assert child is not None
        assert child.poll() is None
    assert child._process.reap() < 0, "killed"


def test_kernels_are_cached_in_the_users_cache(tmp_path: Path) -> None:
    """In a process of its own, because Dynamo chooses a folder only when it is imported."""
    program = """
import os, torch
from echelon.train.loop.network import prepare_device
from torch.optim import SGD
prepare_device(torch.device("cpu"))
SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
import torch._dynamo
print(os.environ["TORCHINDUCTOR_CACHE_DIR"])
"""
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    environment.pop("TORCHINDUCTOR_CACHE_DIR", None)
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(tmp_path / "echelon" / "inductor")


def test_a_run_compiles_if_it_is_long_and_memory_is_free() -> None:
    assert why_not_compile(240.0, needed_bytes=8 << 30, free_bytes=9 << 30) is None
    short = str(why_not_compile(239.4, needed_bytes=0, free_bytes=0))
    assert short == "about 239 s of training are left, and compiling pays off after 240 s"
    full = str(why_not_compile(1e6, needed_bytes=8 << 30, free_bytes=7 << 30))
    assert "needs 8.0 GiB of GPU memory, and 7.0 GiB are free" in full


def test_what_happens_between_steps_does_not_count_as_their_time() -> None:
    now = 0.0
    rate = StepRate(lambda: None, lambda: now)
    assert rate.count_step() is None  # starts the clock
    for _ in range(6):
        now += 0.25
        assert rate.count_step() is None
    rate.pause()
    now += 100.0  # validation
    rate.pause()
    assert rate.count_step() is None
    for measured in (None, None, None, 4.0):
        now += 0.25
        assert rate.count_step() == measured


def test_a_request_describes_the_batch_and_the_kind_of_step() -> None:
    step = BodyWithoutGraph()
    step.step()
    request = requesting(step)()
    assert request.buffer is not None
    images, labels = request.buffer
    assert (images.shape, images.dtype) == ((BATCH, *SHAPE), torch.float32)
    made = images.zeros(CPU)
    assert step.forward.input.buffer is not None
    assert made.stride() == step.forward.input.buffer[0].stride()
    assert labels.dtype is torch.int64
    assert not request.in_regions
    step._body.forward = ForwardInRegions(step.forward.forward_pass)  # type: ignore[assignment]
    assert requesting(step)().in_regions
