"""Steps whose forward and backward passes are CUDA graphs and whose update runs on servers.

Gradients go to the store's own memory, which is pinned, while backward is still running. As soon as a bucket is
complete, one copy moves it there, and an event lets the host push it. Compiled as a whole, a network would complete all
buckets at the end, so Inductor compiles it in a few regions (`trainer.regions`). Weights are copied to a staging buffer
on the GPU as they come back. The next step starts by unpacking all of them to where the network reads them, in half
precision where the run uses it.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from echelon.data.loading.buffers import pin, unpin
from echelon.data.loading.loader import Batches
from echelon.errors import UsageError
from echelon.train.step.average import MovingAverage
from echelon.train.step.captured import WARM_UP_STEPS
from echelon.train.step.eager import Batch, ForwardPass
from echelon.train.step.forward import Compiler, Forward, ForwardInRegions
from echelon.train.step.staging import GradientStaging, WeightStaging
from echelon.train.trainer.servers.bucket import Bucket
from echelon.train.trainer.servers.trainer import ServerTrainer

log = logging.getLogger(__name__)

_CHANGES = "has a gradient in some steps and none in others: use --engine eager for this network"
SPIN_S = 2e-3  # how long the host polls for weights that are due before it blocks


def why_not_capturable_with_servers(trainer: ServerTrainer) -> str | None:
    """Return why steps of this model cannot be captured, or None if they can."""
    if trainer.clips_own_gradient:
        return "this worker clips its own gradient before it sends it"
    dtypes = sorted({str(one.dtype).removeprefix("torch.") for one in trainer.model.parameters() if one.requires_grad})
    return f"weights of {' and '.join(dtypes)} cannot be copied with one staging buffer" if len(dtypes) > 1 else None


class ServerStepBody:
    """Weights in, forward, backward, gradients out. It runs on any device. Calls `on_bucket` per complete bucket."""

    def __init__(
        self,
        forward_pass: ForwardPass,
        trainer: ServerTrainer,
        compiler: Compiler | None = None,
        average: MovingAverage | None = None,
    ) -> None:
        self._sums = forward_pass.sums
        self._average = average
        buckets = trainer.take_control()  # removes the trainer's hooks, which would keep a chain from being divided
        self.forward = ForwardInRegions(forward_pass)
        self.forward.use(compiler)
        leaves = self.forward.leaves
        self.weights = WeightStaging(trainer.kvstore, buckets, dict(forward_pass.model.named_parameters()), leaves)
        self.gradients = [GradientStaging(trainer.kvstore, bucket, leaves) for bucket in buckets]
        self.on_bucket: Callable[[GradientStaging], None] = GradientStaging.copy_out
        self.hooks = [
            leaf.register_post_accumulate_grad_hook(self._gradient_hook(staging))
            for staging in self.gradients
            for leaf in staging.leaves
        ]
        self._unused: dict[str, Tensor] | None = None  # parameters that got no gradient in the first step

    def __call__(self, run: Callable[[Callable[[], None]], None] = lambda part: part()) -> None:
        """Run all parts in order; those that can be compiled with `run`."""
        run(self.forward.gather)
        self.unpack_weights()
        run(self.forward_backward)

    def unpack_weights(self) -> None:
        """Copy the weights from the staging buffer to where the network reads them, and average them."""
        self.weights.unpack()
        if self._average is not None:
            self.weights.renew_parameters()
            self._average.update()

    def forward_backward(self) -> None:
        """Run forward and backward, and copy gradients out as buckets become complete."""
        for staging in self.gradients:
            staging.num_missing = len(staging.leaves)
            for leaf in staging.leaves:
                leaf.grad = None
        loss, sums = self.forward()
        loss.backward()
        self._sums.add_(sums)
        incomplete = [staging for staging in self.gradients if staging.num_missing]
        if self._unused is None:
            self._unused = {}
            for staging in incomplete:
                self._drop_unused(staging)
        elif incomplete:
            raise UsageError(f"{next(iter(incomplete[0].drop_unused()))} {_CHANGES}")

    def _drop_unused(self, staging: GradientStaging) -> None:
        """Remove parameters that the network does not use: they get no gradient, so no bucket may wait for them."""
        assert self._unused is not None
        unused = staging.drop_unused()
        log.info("not used by the network, and not changed: %s", ", ".join(unused))
        self._unused |= unused
        staging.bucket.mark_unused(list(unused))
        self.on_bucket(staging)

    def _gradient_hook(self, staging: GradientStaging) -> Callable[[Tensor], None]:
        def count(leaf: Tensor) -> None:
            if self._unused and any(leaf is one for one in self._unused.values()):
                raise UsageError(f"a parameter {_CHANGES}")
            staging.num_missing -= 1
            if not staging.num_missing:
                self.on_bucket(staging)

        return count


class CapturedServerStep:
    """Replays the body as graphs, pushes each bucket when its copy is complete, and copies new weights back."""

    def __init__(
        self,
        forward_pass: ForwardPass,
        trainer: ServerTrainer,
        *,
        compiled: bool,
        average: MovingAverage | None = None,
    ) -> None:
        self._device = forward_pass.precision.device
        self._batch_size = forward_pass.batch_size
        self._trainer = trainer
        self._pinned = trainer.kvstore.memory()
        for memory in self._pinned:
            pin(memory.data_ptr(), memory.nbytes)
        self._body = ServerStepBody(forward_pass, trainer, torch.compile if compiled else None, average)
        self._out_stream = torch.cuda.Stream(self._device)
        self._in_stream = torch.cuda.Stream(self._device)
        self._copied_out = [torch.cuda.Event(external=True) for _ in self._body.gradients]
        self._in_flight: deque[Bucket] = deque()  # buckets that were pushed and whose weights are not copied in yet
        self._body.on_bucket = self._copy_out
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._num_warm_up = 0

    @property
    def forward(self) -> Forward:
        """The part that Inductor can compile."""
        return self._body.forward

    @property
    def is_captured(self) -> bool:
        """Whether the first steps are done and the next one replays the graphs."""
        return bool(self._graphs)

    def use_compiler(self) -> None:
        """Compile the next step and capture it again. The state of the training is not touched."""
        torch.cuda.synchronize()
        self._graphs.clear()
        self._num_warm_up = 0
        self.forward.use(torch.compile)

    def batches(self, loader: Batches) -> Iterator[Batch | None]:
        """Yield the rest of an epoch: batches, or None for each batch of a loader on the device."""
        return self._body.forward.input.batches(loader)

    def step(self, batch: Batch | None) -> None:
        """Make one step. The last weights to come back are copied in by the next step, or by `trainer.sync`."""
        if batch is not None:
            self._body.forward.input.copy_in(batch)
        self._replay() if self._graphs else self._warm_up()
        samples = self._batch_size
        for staging, copied_out in zip(self._body.gradients, self._copied_out, strict=True):
            while not copied_out.query():
                self._copy_in_if_received()
            self._trainer.push_bucket(staging.bucket, samples)
            self._in_flight.append(staging.bucket)
        self._trainer.count(samples)

    def close(self) -> None:
        """Remove the hooks and unpin the store's memory."""
        torch.cuda.synchronize()
        for hook in self._body.hooks:
            hook.remove()
        for memory in self._pinned:
            unpin(memory.data_ptr())

    def _replay(self) -> None:
        """Replay the graphs: the batch is gathered while the last weights come back.

        The long graph is separate, so that the host launches it while the short one for the weights runs.
        """
        *gather_batch, unpack_weights, forward_backward = self._graphs
        for graph in gather_batch:
            graph.replay()
        self._wait_for_weights()
        unpack_weights.replay()
        forward_backward.replay()

    def _warm_up(self) -> None:
        """Make one of the first steps without graphs; after the last of them, capture the graphs."""
        self._wait_for_weights()
        current = torch.cuda.current_stream()
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            if self.forward.compiled and not self._num_warm_up:
                self._body(self.forward.run_first)
            else:
                self._body()
        current.wait_stream(stream)
        torch.cuda.synchronize()
        self._num_warm_up += 1
        if self._num_warm_up > WARM_UP_STEPS:
            self._capture()

    def _capture(self) -> None:
        body = self._body
        pool = torch.cuda.graph_pool_handle()
        gather = [body.forward.gather] if body.forward.input.loader is not None else []
        for part in (*gather, body.unpack_weights, body.forward_backward):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                part()
                if part == body.forward_backward:
                    torch.cuda.current_stream().wait_stream(self._out_stream)
            self._graphs.append(graph)

    def _wait_for_weights(self) -> None:
        """Copy in all weights of the previous step, and let the current stream wait for the copies."""
        deadline = time.monotonic() + SPIN_S
        while self._in_flight and time.monotonic() < deadline:
            self._copy_in_if_received()
        while self._in_flight:
            self._copy_in_next()
        torch.cuda.current_stream().wait_stream(self._in_stream)

    def _copy_out(self, staging: GradientStaging) -> None:
        self._out_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._out_stream):
            staging.copy_out()
            self._copied_out[staging.bucket.index].record(self._out_stream)

    def _copy_in_if_received(self) -> None:
        """Copy in received weights while backward runs, which does not read the staging buffer."""
        if self._in_flight and self._in_flight[0].is_answered:
            self._copy_in_next()

    def _copy_in_next(self) -> None:
        self._trainer.wait_for_bucket(self._in_flight[0])
        with torch.cuda.stream(self._in_stream):
            self._body.weights.copy_in(self._in_flight.popleft().index)
