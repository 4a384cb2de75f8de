"""Steps whose forward and backward are one CUDA graph and whose update happens on servers.

Gradients leave for the store's own memory, which is pinned, while backward is still running: as soon as a bucket is
complete, one copy brings it over and an event tells the host, which pushes it. So that buckets are complete early when
Inductor compiles, it compiles the network in a few pieces (`regions`). Weights go to the GPU as they come back; the
next graph begins by putting all of them where the network reads them, in half precision where it is wanted.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from echelon.data.loading.loader import Batches
from echelon.data.loading.pinned import pin, unpin
from echelon.errors import UsageError
from echelon.train.step.average import MovingAverage
from echelon.train.step.captured import WARM_STEPS, Compiler, OnDevice, bring, halved_weights, next_batches
from echelon.train.step.eager import Batch, Work
from echelon.train.step.staging import Arrivals, Departure
from echelon.train.trainer.regions import in_regions
from echelon.train.trainer.server import ServerTrainer

log = logging.getLogger(__name__)

_CHANGES = "has a gradient in some steps and none in others: use --engine eager for this network"
IMPATIENT_S = 2e-3  # an answer that is due is looked for again and again before this thread goes to sleep over it


def why_not_served(trainer: ServerTrainer) -> str | None:
    """What about a model keeps its steps from being captured, or None."""
    dtypes = sorted({str(one.dtype).removeprefix("torch.") for one in trainer.model.parameters() if one.requires_grad})
    return f"weights of {' and '.join(dtypes)} cannot come back in one piece" if len(dtypes) > 1 else None


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
        halved = halved_weights(work.model) if half is not None else {}
        copies = {name: weight.detach().to(half).requires_grad_() for name, weight in halved.items()}
        full: dict[str, Tensor] = dict(work.model.named_parameters())
        leaves = full | copies
        buckets = trainer.drive()
        self.arrivals = Arrivals(trainer, buckets, full, leaves)
        self.departures = [
            Departure(trainer, index, {name: leaves[name] for name in names}) for index, names in enumerate(buckets)
        ]
        self._compiler = compiler or (lambda function: function)
        self._network = in_regions(work.model, copies, self._compiler)
        self._judge = self._compiler(work.judge)
        self._gather: Callable[[], Batch] | None = None
        self.source: OnDevice | None = None
        self.input: Batch | None = None
        self._batch: Batch | None = None
        self.launch: Callable[[Departure], None] = Departure.bring
        self.hooks = [
            leaf.register_post_accumulate_grad_hook(self._counter(departure))  # type: ignore[no-untyped-call]
            for departure in self.departures
            for leaf in departure.leaves
        ]
        self._trainer = trainer
        self._unused: dict[str, Tensor] | None = None  # what the first step found to get no gradient

    def __call__(self) -> None:
        """Run it."""
        self.gather()
        self.take_weights()
        self.learn()

    def gather(self) -> None:
        """The part that needs no weights: the next batch."""
        if self.source is None:
            self._batch = self.input
            return
        if self._gather is None:
            self._gather = self._compiler(self.source.gather)
        self._batch = self._gather()

    def take_weights(self) -> None:
        """The part that takes the weights in."""
        self.arrivals.take()
        if self._average is not None:
            self.arrivals.renew()
            self._average.update()

    def learn(self) -> None:
        """The rest: forward, backward, gradients out."""
        for departure in self.departures:
            departure.missing = len(departure.leaves)
            for leaf in departure.leaves:
                leaf.grad = None
        loss, sums = self._measured()
        loss.backward()  # type: ignore[no-untyped-call]
        self._work.sums.add_(sums)
        late = [departure for departure in self.departures if departure.missing]
        if self._unused is None:
            self._unused = {}
            for departure in late:
                self._leave_out_unused(departure)
        elif late:
            raise UsageError(f"{next(iter(late[0].leave_out_unused()))} {_CHANGES}")

    def _leave_out_unused(self, departure: Departure) -> None:
        """What the network does not use gets no gradient in any step: nothing is to wait for it."""
        assert self._unused is not None
        unused = departure.leave_out_unused()
        log.info("not used by the network, and left as they are: %s", ", ".join(unused))
        self._unused |= unused
        self._trainer.leave_out(departure.index, list(unused))
        self.launch(departure)

    def _counter(self, departure: Departure) -> Any:
        def ready(leaf: Tensor) -> None:
            if self._unused and any(leaf is one for one in self._unused.values()):
                raise UsageError(f"a parameter {_CHANGES}")
            departure.missing -= 1
            if not departure.missing:
                self.launch(departure)

        return ready

    def _measured(self) -> tuple[Tensor, Tensor]:
        assert self._batch is not None
        images, labels = self._batch
        with self._work.precision.autocast():
            logits = self._network(images)
        loss, sums = self._judge(logits, labels)
        return loss, sums


class ServedStep:
    """Replays the body, pushes each bucket when it has arrived, and fetches the new weights."""

    def __init__(
        self, work: Work, trainer: ServerTrainer, *, compiled: bool, average: MovingAverage | None = None
    ) -> None:
        self.work = work
        self._trainer = trainer
        self._pinned = trainer.kvstore.memory()
        for memory in self._pinned:
            pin(memory.data_ptr(), memory.nbytes)
        self._body = ServedBody(work, trainer, torch.compile if compiled else None, average)
        self._outward = torch.cuda.Stream(work.precision.device)  # type: ignore[no-untyped-call]
        self._inward = torch.cuda.Stream(work.precision.device)  # type: ignore[no-untyped-call]
        self._left = [torch.cuda.Event(external=True) for _ in self._body.departures]  # type: ignore[no-untyped-call]
        self._due: deque[int] = deque()  # buckets whose weights have not come back yet
        self._body.launch = self._launch
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._num_warm = 0
        self._last: Tensor | None = None

    def batches(self, loader: Batches) -> Iterator[Batch | None]:
        """As `CapturedStep.batches`."""
        return next_batches(self._body, loader)

    def step(self, batch: Batch | None) -> None:
        """One step; the weights that come back last are taken in by the next one, or by `trainer.sync`."""
        if batch is not None:
            self._last = bring(self._body, batch, self._last, self.work.precision.device)
        self._replay() if self._graphs else self._warm()
        for departure, left in zip(self._body.departures, self._left, strict=True):
            while not left.query():  # type: ignore[no-untyped-call]
                self._fetch_if_there()
            self._trainer.send(departure.index, self.work.batch_size)
            self._due.append(departure.index)
        self._trainer.count(self.work.batch_size)

    def close(self) -> None:
        """Let the store's memory go."""
        torch.cuda.synchronize()
        for hook in self._body.hooks:
            hook.remove()
        for memory in self._pinned:
            unpin(memory.data_ptr())

    def _replay(self) -> None:
        """The batch is made while the last weights come, and the long graph is launched while a short one runs."""
        *gather, take_weights, learn = self._graphs
        for graph in gather:
            graph.replay()
        self._land()
        take_weights.replay()
        learn.replay()

    def _warm(self) -> None:
        """A plain step. After the last of them, the next is a replay."""
        self._land()
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
        body = self._body
        pool = torch.cuda.graph_pool_handle()
        for part in ([body.gather] if body.source is not None else []) + [body.take_weights, body.learn]:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                part()
                if part == body.learn:
                    torch.cuda.current_stream().wait_stream(self._outward)
            self._graphs.append(graph)

    def _land(self) -> None:
        """See that all weights of the step before are on the device before anything reads them."""
        deadline = time.monotonic() + IMPATIENT_S
        while self._due and time.monotonic() < deadline:
            self._fetch_if_there()
        while self._due:
            self._fetch()
        torch.cuda.current_stream().wait_stream(self._inward)

    def _launch(self, departure: Departure) -> None:
        self._outward.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._outward):
            departure.bring()
            self._left[departure.index].record(self._outward)

    def _fetch_if_there(self) -> None:
        """Weights that came back go to the device while backward runs: they are read when the next graph begins."""
        if self._due and self._trainer.has_come(self._due[0]):
            self._fetch()

    def _fetch(self) -> None:
        self._trainer.receive(self._due[0])
        with torch.cuda.stream(self._inward):
            self._body.arrivals.fetch(self._due.popleft())
