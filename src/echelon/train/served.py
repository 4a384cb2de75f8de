"""Steps whose forward and backward are one CUDA graph and whose update happens on servers.

Gradients leave for the store's own memory, which is pinned, while backward is still running: as soon as a bucket is
complete, one copy brings it over and an event tells the host, which pushes it. So that buckets are complete early when
Inductor compiles, it compiles the network in a few pieces (`regions`). The weights that come back go to flat copies on
the GPU, a bucket at a time; the graph begins by putting them where the network reads them, in half precision where it
is wanted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from echelon.data.pipeline import Batches
from echelon.errors import UsageError
from echelon.train.average import MovingAverage
from echelon.train.captured import WARM_STEPS, Compiler, HalfWeights, OnDevice, bring, next_batches
from echelon.train.regions import in_regions
from echelon.train.server_trainer import ServerTrainer
from echelon.train.steps import Batch, Work

log = logging.getLogger(__name__)


class Crossing:
    """A bucket on its way: flat memory on the device, the store's memory, and what to read and write on the device."""

    def __init__(self, trainer: ServerTrainer, index: int, full: dict[str, Tensor], leaves: dict[str, Tensor]) -> None:
        """`full` are the weights in float32, `leaves` what the network reads in their place."""
        self.index = index
        device = next(iter(full.values())).device
        self.leaves = list(leaves.values())
        self._full = [weight.detach() for weight in full.values()]
        self._out, self._in = trainer.kvstore.span(list(leaves))
        self._gradients = torch.zeros_like(self._out, device=device)
        self._weights = torch.zeros_like(self._in, device=device)
        self._gradient_views: list[Tensor] = []
        self._weight_views: list[Tensor] = []
        for name, leaf in leaves.items():
            at = (trainer.kvstore.views(name)[1].data_ptr() - self._out.data_ptr()) // self._out.element_size()
            self._gradient_views.append(self._gradients[at : at + leaf.numel()].view(leaf.shape))
            self._weight_views.append(self._weights[at : at + leaf.numel()].view(leaf.shape))
        torch._foreach_copy_(self._weight_views, self._full)
        self.missing = 0

    def take_weights(self) -> None:
        """Put the weights where the network reads them. Device work."""
        torch._foreach_copy_([leaf.detach() for leaf in self.leaves], self._weight_views)

    def renew(self) -> None:
        """Put the weights into the model's own parameters, too. Device work."""
        torch._foreach_copy_(self._full, self._weight_views)

    def bring_gradients(self) -> None:
        """Gather the gradients and copy them to the store's memory. Device work."""
        gradients = [leaf.grad for leaf in self.leaves]
        torch._foreach_copy_(self._gradient_views, gradients)  # type: ignore[arg-type]
        self._out.copy_(self._gradients, non_blocking=True)

    def fetch_weights(self) -> None:
        """Copy the weights from the store's memory."""
        self._weights.copy_(self._in, non_blocking=True)


class ServedBody:
    """Weights in, forward, backward, gradients out; runs on any device. `launch` is called for each complete bucket."""

    def __init__(
        self,
        work: Work,
        trainer: ServerTrainer,
        compiler: Compiler | None = None,
        average: MovingAverage | None = None,
    ) -> None:
        self._work = work
        self._average = average
        half = work.precision.half
        self._halves = HalfWeights(work.model, half, hand_over=False) if half is not None else None
        copies = self._halves.copies if self._halves is not None else {}
        parameters = dict(work.model.named_parameters())
        self.crossings: list[Crossing] = []
        for index, names in enumerate(trainer.drive()):
            full: dict[str, Tensor] = {name: parameters[name] for name in names}
            self.crossings.append(Crossing(trainer, index, full, {n: copies.get(n, full[n]) for n in names}))
        self._compiler = compiler or (lambda function: function)
        self._network = in_regions(work.model, copies, self._compiler)
        self._judge = self._compiler(work.judge)
        self._gather: Callable[[], Batch] | None = None
        self.source: OnDevice | None = None
        self.input: Batch | None = None
        self.launch: Any = Crossing.bring_gradients
        self.hooks = [
            leaf.register_post_accumulate_grad_hook(self._counter(crossing))  # type: ignore[no-untyped-call]
            for crossing in self.crossings
            for leaf in crossing.leaves
        ]

    def __call__(self) -> None:
        """Run it."""
        for crossing in self.crossings:
            crossing.take_weights()
            crossing.missing = len(crossing.leaves)
            for leaf in crossing.leaves:
                leaf.grad = None
        if self._average is not None:
            for crossing in self.crossings:
                crossing.renew()
            self._average.update()
        loss, sums = self._measured()
        loss.backward()  # type: ignore[no-untyped-call]
        self._work.sums.add_(sums)
        late = [crossing.index for crossing in self.crossings if crossing.missing]
        if late:
            raise UsageError(f"bucket {late[0]} has parameters without a gradient: use --engine eager for this network")

    def _counter(self, crossing: Crossing) -> Any:
        def ready(leaf: Tensor) -> None:
            crossing.missing -= 1
            if not crossing.missing:
                self.launch(crossing)

        return ready

    def _measured(self) -> tuple[Tensor, Tensor]:
        images, labels = self._batch()
        with self._work.precision.autocast():
            logits = self._network(images)
        loss, sums = self._judge(logits, labels)
        return loss, sums

    def _batch(self) -> Batch:
        if self.source is None:
            assert self.input is not None
            return self.input
        if self._gather is None:
            self._gather = self._compiler(self.source.gather)
        return self._gather()


class ServedStep:
    """Replays the body, pushes each bucket when it has arrived, and fetches the new weights."""

    def __init__(
        self, work: Work, trainer: ServerTrainer, *, compiled: bool, average: MovingAverage | None = None
    ) -> None:
        self.work = work
        self._trainer = trainer
        self._pinned = [pin(memory) for memory in trainer.kvstore.memory()]
        self._body = ServedBody(work, trainer, torch.compile if compiled else None, average)
        self._side = torch.cuda.Stream(work.precision.device)  # type: ignore[no-untyped-call]
        self._arrived = [torch.cuda.Event(external=True) for _ in self._body.crossings]  # type: ignore[no-untyped-call]
        self._body.launch = self._launch
        self._graph: torch.cuda.CUDAGraph | None = None
        self._num_warm = 0
        self._last: Tensor | None = None

    def batches(self, loader: Batches) -> Iterator[Batch | None]:
        """As `CapturedStep.batches`."""
        return next_batches(self._body, loader)

    def step(self, batch: Batch | None) -> None:
        """One step: the weights of the next one are on their way to the device when it returns."""
        if batch is not None:
            self._last = bring(self._body, batch, self._last, self.work.precision.device)
        self._run()
        for crossing in self._body.crossings:
            self._arrived[crossing.index].synchronize()
            self._trainer.send(crossing.index, self.work.batch_size)
        for crossing in self._body.crossings:
            self._trainer.receive(crossing.index)
            crossing.fetch_weights()
        self._trainer.count(self.work.batch_size)

    def close(self) -> None:
        """Let the store's memory go."""
        torch.cuda.synchronize()
        for hook in self._body.hooks:
            hook.remove()
        for memory in self._pinned:
            unpin(memory)

    def _run(self) -> None:
        if self._graph is not None:
            self._graph.replay()
            return
        current = torch.cuda.current_stream()
        warm = torch.cuda.Stream(self.work.precision.device)  # type: ignore[no-untyped-call]
        warm.wait_stream(current)
        with torch.cuda.stream(warm):
            self._body()
        current.wait_stream(warm)
        torch.cuda.synchronize()
        self._num_warm += 1
        if self._num_warm > WARM_STEPS:
            self._capture()

    def _capture(self) -> None:
        """The step just done was a plain one; the next is a replay."""
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._body()
            torch.cuda.current_stream().wait_stream(self._side)

    def _launch(self, crossing: Crossing) -> None:
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            crossing.bring_gradients()
            self._arrived[crossing.index].record(self._side)


def pin(memory: Tensor) -> Tensor:
    """Pin memory that is there already, so that copies need not wait for the host."""
    num_bytes = memory.numel() * memory.element_size()
    status = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), num_bytes, 0)  # type: ignore[no-untyped-call]
    if int(status):
        raise UsageError(f"CUDA cannot pin {num_bytes} bytes of the store's memory: {status}")
    return memory


def unpin(memory: Tensor) -> None:
    """Undo `pin`."""
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())  # type: ignore[no-untyped-call]
