"""The Trainer of a store without servers: gradients are averaged over the group in backward, weights updated here.

A process that trains alone has nothing to sum: a step is the optimizer's own, without copies, and a CUDA graph can
record it (`update`). In a group, the gradients of a bucket, times the samples of the batch, are summed as soon as
autograd has finished the last of them, in the same order on all ranks. When backward ends, they are divided by the
samples of all: the mean over the joined batch (`mean_gradients`). With an optimizer that is divided among the ranks
(`nccl`), `sharded` has the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from echelon.errors import UsageError
from echelon.kvstore.collective.store import CollectiveStore
from echelon.train.trainer.base import Trainer
from echelon.train.trainer.group import GroupTrainer
from echelon.train.trainer.servers.sparse_rows import find_tables
from echelon.train.trainer.step_times import Phase
from echelon.train.trainer.workers.bucket_reductions import BucketReductions
from echelon.train.trainer.workers.flat_buckets import make_flat_buckets
from echelon.train.trainer.workers.mean_gradients import MeanGradientTrainer, StepTotals
from echelon.train.trainer.workers.sparse_gather import SparseGradients


class CollectiveTrainer(MeanGradientTrainer, GroupTrainer, store=CollectiveStore):
    """Keeps the models of a group equal."""

    kvstore: CollectiveStore

    def _start(self) -> None:
        super()._start()
        self._flags_in_flight: tuple[StepTotals, torch.cuda.Event] | None = None  # being copied to the host
        self.capturable = self._group.size == 1
        self.shards_optimizer = self.kvstore.sharded
        if self._group.size > 1:
            self._refuse_lbfgs()
            self._agree_on_parameters()
            self._broadcast_trained()
            tables = find_tables(self.model, self._parameters, self.optimizer)
            self._tables = SparseGradients({name: self._parameters[name] for name in tables}, self._group)
            dense = {name: p for name, p in self._parameters.items() if name not in tables}
            self._buckets = make_flat_buckets(dense, self._group.size)
            self._join()

    def _join(self) -> None:
        self._copy_optimizer_state(0)
        self._reductions = BucketReductions(self._buckets, self._group.all_reduce)
        self._start_reducing(self._group.size)

    def _add_to_store(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._check_same_parameters("parameters that the optimizer got", parameters)
        self._group.broadcast(list(parameters.values()))
        tables = find_tables(self.model, parameters, self.optimizer)
        self._tables.parameters = {**self._tables.parameters, **{name: parameters[name] for name in tables}}
        dense = {name: p for name, p in parameters.items() if name not in tables}
        self._buckets += make_flat_buckets(dense, self._group.size)
        self._reductions = BucketReductions(self._buckets, self._group.all_reduce)

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Load weights and buffers into the model; those of rank 0 count. All workers call it."""
        super().load_weights(weights)
        self._broadcast_model()

    # --- a step

    @property
    def _has_sent_early(self) -> bool:
        return self._reductions.num_started > 0

    def _send_early(self, name: str, samples: int) -> None:
        if name in self._tables.parameters:
            return  # sent at the end of backward
        if self._reductions.was_sent(name):
            raise UsageError(
                f"worker {self.kvstore.rank}: the gradient of {name!r} changed after it was sent during the same "
                "backward pass (a parameter shared with a checkpointed part?); use Trainer(overlap=False)"
            )
        self._reductions.arrive(name, samples)

    def _reduce(self, samples: int, *, active: bool) -> StepTotals:
        self._reductions.start_rest(samples)
        given = self._reductions.given | self._tables.given(samples)
        pending = self._reduce_step_vector(samples, active, (name in given for name in self._names))
        with self.times.during(Phase.WAIT):
            sums = self._reductions.results()
            totals = StepTotals.of(pending.result(), self._group.size)
        if (name := self._reductions.changed()) is not None:
            raise UsageError(
                f"the gradient of {name!r} was changed during backward, after it was sent, by a hook; register the "
                "hook before the Trainer is created, or use Trainer(overlap=False)"
            )
        used = given
        if len(given) < len(self._names):  # only then can another process have gradients that this one does not have
            used = {name for name, count in zip(self._names, totals.used.tolist(), strict=True) if count}
        divisor = totals.samples.clamp_min(1)
        for bucket, total in zip(self._buckets, sums, strict=True):
            total /= divisor
            bucket.write_gradients(total, used)
        self._tables.reduce(samples, divisor, used)
        self._reductions.clear()
        return totals

    def _receive(self, totals: StepTotals) -> None:
        """Handle the flags of a reduction, on all ranks after the same one.

        On a GPU that is one reduction later, when they are on the host without waiting for the device.
        """
        if totals.halt.device.type == "cpu":
            self._handle(totals)
            return
        if self._flags_in_flight is not None:
            flags, copied = self._flags_in_flight
            copied.synchronize()
            self._handle(flags)
        copied = torch.cuda.Event()
        flags = StepTotals(*(one.to("cpu", non_blocking=True) for one in totals))
        copied.record()
        self._flags_in_flight = flags, copied

    def _handle(self, flags: StepTotals) -> None:
        self.kvstore.receive_flags(float(flags.halt))
        if not flags.clocks_are_equal:
            raise self._clocks_error()

    def _retire(self) -> None:
        self._group.stop_gathering()
        super()._retire()

    def _are_all_here(self, totals: StepTotals) -> bool:
        self.kvstore.some_have_retired = bool(totals.retired)
        return super()._are_all_here(totals)

    def _make_equal(self, sources: Sequence[int]) -> None:
        """Copy the weights and the optimizer's state of a rank that made more steps."""
        self._group.broadcast(list(self._parameters.values()), sources[0])
        self._copy_optimizer_state(sources[0])

    def _copy_optimizer_state(self, source: int) -> None:
        state = self._share_state(Trainer.optimizer_state(self), source)
        if self._group.rank != source and (state or self.optimizer.state):
            self.optimizer.state.clear()
            Trainer.load_optimizer_state(self, state)
