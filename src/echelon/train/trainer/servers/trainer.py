"""The Trainer of a store on servers: gradients are pushed in buckets during backward, new weights come back.

When autograd has finished a gradient, a hook copies it to its place in the store's memory. When a bucket is complete it
is pushed, while backward continues (`overlap`). The optimizer runs on the servers; the optimizer in this process
defines which one, and its settings in each step (`attached`). `step` waits for the new weights and copies them into the
parameters (`weights`), unless `lazy_pull` leaves that to the next forward pass.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch.optim import SGD

from echelon.cluster.messages import Done, OpenLedger, OptimizerSpec, Work
from echelon.errors import JobError, UsageError, WorkerRemoved
from echelon.kvstore.leases import EqualLeases, Leases
from echelon.kvstore.optimizer_spec import StepSettings, spec_of
from echelon.kvstore.servers.client import Ticket
from echelon.kvstore.servers.store import ServerStore
from echelon.train.trainer.base import Hook, Trainer
from echelon.train.trainer.buckets import names_by_bucket
from echelon.train.trainer.leaving import SIGTERM, SigtermHandler
from echelon.train.trainer.model_hook import ModelHook
from echelon.train.trainer.optimizer_state import state_of
from echelon.train.trainer.servers.bucket import Bucket
from echelon.train.trainer.servers.factors import FactoredLinear, factorable_layers
from echelon.train.trainer.servers.gradients import WatchedGradient
from echelon.train.trainer.servers.lazy_pull import LazyPull
from echelon.train.trainer.servers.loop_watch import LoopWatch
from echelon.train.trainer.servers.newcomers import average_over_workers, give_to_newcomers, take_as_newcomer
from echelon.train.trainer.servers.overlap import Overlap
from echelon.train.trainer.servers.sparse_rows import SparseTables, as_dense, check_optimizer, find_tables
from echelon.train.trainer.servers.weights import ModelWeights, digest, real
from echelon.train.trainer.start_equal import copy_from_first_worker, untrained_tensors
from echelon.train.trainer.step_times import Phase

log = logging.getLogger(__name__)

# A gradient's copy from a GPU takes longer to start than to make. On an H200, ResNet-20 (1 MB) made 1.4 times as many
# steps without overlap, and a language model of 43 MB 0.9 times as many (docs/results.md).
SMALL_ON_GPU = 8 << 20

_OPEN: WeakSet[ServerTrainer] = WeakSet()  # in whose rounds this worker may have to take part


class ServerTrainer(Trainer, store=ServerStore):
    """Trains a model whose weights are on servers."""

    kvstore: ServerStore
    _updates_here = False

    def _start(self) -> None:
        if self.kvstore.optimizer_spec is not None:
            raise UsageError(
                f"the store already has an optimizer ({self.kvstore.optimizer_spec.name}), of another Trainer or of "
                "set_optimizer; give each Trainer a store of its own: pass the name of the store "
                f"(kvstore={self.kvstore.type!r}), or what another call of echelon.kvstore.create returns"
            )
        self._step_hooks: list[Hook] = []
        self._num_workers_at_start = self.kvstore.num_workers
        self._sigterm = SigtermHandler(self.kvstore.announce_leaving)
        self._removed: WorkerRemoved | None = None  # noticed outside of `step`, which then drops the step
        self._captured = False  # whether the caller moves gradients and weights, in place of the hooks
        self._pushed_step = 0  # the step that pushes in flight belong to
        self._halts_at: int | None = None  # the step after which all workers stop
        self._samples_at_backward: int | None = None  # the batch that this step's gradients belong to
        self._settings = StepSettings(self.optimizer)
        self._clips_on_servers = self.max_grad_norm is not None and self.kvstore.sums_with_others
        if self.clips_own_gradient:
            self._overlap = False  # the norm is known when all gradients are
        self._early = Overlap(self._wanted_overlap())  # whether gradients are sent during backward
        self._densified: set[str] = set()  # dense parameters that had a sparse gradient
        self._tables = self._make_tables()
        self._send_optimizer()  # first, because it decides how keys are placed
        self._buckets = self._make_buckets()
        self._names = [name for bucket in self._buckets for name in bucket.names]
        self._parameters = {name: self._parameters[name] for name in (*self._names, *self._tables.parameters)}
        self._bucket_of = {name: bucket for bucket in self._buckets for name in bucket.names}
        sent = {name: self._bucket_of[name].weights[name] for name in self._names}
        self._weights = ModelWeights({name: self._parameters[name] for name in self._names}, sent, lazy=self._lazy_pull)
        self._watch = LoopWatch(
            self.optimizer,
            self._weights,
            self._early,
            lambda: len(self.kvstore.group),
            self.kvstore.type,
            allow_edits=self._local_gradient_edits,
        )
        self._initialise_servers()
        self._add_hooks()
        self.kvstore.waiting.on_missed_rounds = self.refresh
        self.kvstore.waiting.on_joined = self._fetch_all
        self.kvstore.waiting.on_removed = self._join_again
        self.kvstore.waiting.check_join = self._check_join
        _OPEN.add(self)

    # --- the loop

    def _take_part(self) -> None:
        """Join the rounds of the others before the first step of a late worker."""
        try:
            self.kvstore.take_part()
        except WorkerRemoved as error:
            self._removed = error

    def _step(self, samples: int) -> None:
        self.kvstore.take_part()
        self._check_frozen()
        if self._gradients_sent:
            replaced = [name for name in self._names if self._replaced(name)]
            self._watch.check_unchanged(replaced, tables_edited=bool(self._tables.edited()))
        else:
            self._watch.observe(self._parameters, self._samples_seen, samples)
            self._send_edits()
        if self.clips_own_gradient:
            self._clip()
        # torch's SGD adds the values of a repeated row one after the other. One worker gives the same bits.
        add_repeated = self.kvstore.num_workers > 1 or type(self.optimizer) is not SGD
        with self.times.during(Phase.PUSH):
            self._tables.push(samples, add_repeated=add_repeated, gated=self._clips_on_servers)
            for bucket in self._buckets:
                if not bucket.is_pushed:
                    self._push_incomplete(bucket, samples)
        self._pushed_step = self.clock + 1
        if self._clips_on_servers:
            self._clip_on_servers()
        for bucket in self._buckets:
            bucket.end_step()
        if self.kvstore.has_siblings:  # a GAN: the generator's backward pass also gives the discriminator gradients
            self._early.rule_out("has several Trainers, and one's backward pass may give the other's model gradients")
        self._watch.end_step()
        self._wait_for_tables()
        if self._lazy is None:
            self.sync()
        else:
            self._lazy.end_step()
        self._raise_if_removed()

    def make_step(self, samples: int) -> None:
        """Exchange gradients, update the weights and count the step.

        If the scheduler has removed this worker because it was stopped or cut off, the step is dropped, and the worker
        joins the job again.
        """
        try:
            self._raise_if_removed()
            super().make_step(samples)
        except WorkerRemoved as error:
            log.warning("%s; this worker drops the step and joins the job again", error)
            if self._leased is not None:
                self._leased.drop_step()
            self._join_again()

    def _beside(self) -> list[Trainer]:
        others = [trainer for trainer in _OPEN if trainer is not self and trainer._is_in_rounds]
        return sorted(others, key=lambda trainer: trainer.kvstore.number) if self.kvstore.has_siblings else []

    @property
    def _is_in_rounds(self) -> bool:
        """Whether rounds wait for a step of this Trainer that the loop may not make, because it has no samples.

        Not if it has leases of its own, has not joined the rounds yet, or has sent the gradients of a step.
        """
        store = self.kvstore
        in_rounds = store.kind.lock_step and store.waiting.takes_part and not store.waiting.has_retired
        return in_rounds and not store.is_closed and self._leased is None and not self._gradients_sent

    def _check_join(self) -> None:
        """Raise UsageError if this late worker takes part in the rounds of another Trainer already, and both are tight.

        The others make the steps of both in turns. It would join this one at another step of their loop than that one,
        by up to the bound and two, and then each side waits for the other. If it ends, the others continue, and train
        its samples.
        """
        store = self.kvstore
        beside = [one.kvstore for one in _OPEN if one is not self and not one.kvstore.is_closed]
        is_alone = len(store.workers) == 1
        if not is_alone and store.is_tight and any(one.is_tight and one.waiting.takes_part for one in beside):
            raise UsageError(
                f"worker {store.rank} cannot join a running job that steps two Trainers with {store.kind.name}: their "
                "rounds may be at different steps of the loop; the other workers continue without it (dist_async, and "
                "dist_ssync with a staleness of 2 or more, admit it)"
            )

    def join_again(self, error: WorkerRemoved) -> None:
        log.warning("%s; this worker joins the job again", error)
        self._join_again()
        self.kvstore.take_part()

    def _raise_if_removed(self) -> None:
        if self._removed is not None:
            raise self._removed

    def _join_again(self) -> None:
        """Join the job again as a late worker: what was pushed and not answered is lost. The next step takes part."""
        if self._captured:
            raise JobError(
                f"worker {self.kvstore.rank} was removed from the job while it was stopped or cut off, and captured "
                "steps cannot join it again; start the worker again"
            )
        while True:
            self._removed = None
            for bucket in self._buckets:
                bucket.forget()
            self._tables.forget()
            self._watch.end_step()
            if self._leased is not None:
                self._leased.forget()  # its leases were given to others
            self._samples_at_backward, self._samples_seen, self._samples_accumulated = None, None, 0
            try:
                self.kvstore.rejoin()
                self._fetch_all()
            except WorkerRemoved as error:  # once more
                log.warning("%s", error)
                continue
            self.kvstore.events.write("rejoined", worker=self.kvstore.rank)
            return

    def count(self, samples: int) -> None:
        """Do the host's part of a step: count it, report progress, and stop if all workers stop here."""
        super().count(samples)
        self._samples_at_backward = None
        if self._start_equal and self.kvstore.has_newcomers:
            give_to_newcomers(self.kvstore, untrained_tensors(self.model, self._parameters.values()))
        if self._halts_at is not None and self.clock >= self._halts_at and not self.kvstore.halted:
            self.kvstore.accept_halt()

    @property
    def _loses_step(self) -> bool:
        """Whether other workers train the samples of this step, so that its gradients must not be sent."""
        return self._leased is not None and self._leased.loses_step

    @property
    def next_clock(self) -> int:
        self.kvstore.survive(self.kvstore.take_part)  # a late worker has no clock before it has joined the rounds
        return self.kvstore.clock

    def set_work(self, work: list[Work]) -> None:
        self.kvstore.work = work

    @property
    def _is_applied(self) -> bool:
        return self._lazy is None

    @property
    def stopped(self) -> str | None:
        if self.kvstore.halted:
            return self.kvstore.halted
        return SIGTERM if self.kvstore.may_leave else None

    def _handle_sigterm(self) -> None:
        self._sigterm.install()

    def end_leases(self) -> None:
        """End the use of samples. A worker that was told to end leaves the job then, and the others continue."""
        opened = None if self._leased is None else self._leased.leases
        self.close_leases()
        if self.kvstore.may_leave and not self.kvstore.halted:
            if not self.kvstore.has_left:
                log.warning("worker %d leaves the job: %s; the other workers continue", self.kvstore.rank, SIGTERM)
            self.close()
        elif self.kvstore.halted == SIGTERM and opened is not None and not opened.ended:
            self.kvstore.report_defect(f"{SIGTERM} stopped all workers in epoch {opened.epoch}")

    def close(self) -> None:
        """Wait for the last step and for the other workers, remove the hooks and close the store.

        A worker that was told to end (SIGTERM) waits for nobody, and leaves the job.
        """
        super().close()
        _OPEN.discard(self)
        self._sigterm.close()
        if self.kvstore.may_leave and not self.kvstore.halted and not self.kvstore.has_left:
            self.kvstore.leave_as_told()

    def _open_leases(self, opened: OpenLedger) -> Leases:
        if self.stopped is not None:
            return EqualLeases(replace(opened, epoch=opened.num_epochs), [self.kvstore.rank], self.kvstore.rank)
        self.kvstore.take_part()  # leases say at which clocks their rounds are
        return self.kvstore.open_leases(opened)

    def sync(self) -> None:
        """Wait until every parameter has the weights of the last step."""
        for bucket in self._buckets:
            self._wait_if_in_flight(bucket)
        if self._captured:
            self._weights.take(self._names)

    def zero_grad(self) -> None:
        """Discard gradients that were not pushed yet."""
        super().zero_grad()
        for bucket in self._buckets:
            bucket.discard()
            if not bucket.is_pushed:
                for name in bucket.names:
                    self._watch.discard(name)

    def refresh(self) -> None:
        """Fetch the weights that the servers have now, with the last pushes of all workers."""
        self.sync()
        if self._removed is None:
            self._pull()
            self._tables.fetch_changes()

    def _fetch_all(self) -> None:
        """Fetch all weights, as a worker that joins: the servers do not know what it has."""
        self.sync()
        self._pull()
        self._tables.fetch_all()

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Load weights and buffers into the model and the servers. All workers call it."""
        self.sync()
        super().load_weights(weights)
        self._publish_weights()

    def optimizer_state(self) -> dict[str, Tensor]:
        """Return the servers' state as `<parameter>/<state>`."""
        self.sync()
        return self.kvstore.optimizer_states()

    def load_optimizer_state(self, state: Mapping[str, Tensor]) -> None:
        """Send the servers a state. All workers call it."""
        self.sync()
        if self.kvstore.is_first:
            self.kvstore.put_optimizer_states(dict(state), "the state")
        self.kvstore.barrier()

    def _wait_for_others(self) -> None:
        num_workers = max(self._num_workers_at_start, self.kvstore.num_workers)  # others may have left already
        if self.clock == 0 and num_workers > 1:
            self._watch.check_not_in_place_of_steps(num_workers, lock_step=self.kvstore.kind.lock_step)
        ended = not (self._clips_on_servers and self._gradients_sent)  # else servers hold a step that this worker left

        def wait() -> None:
            self._raise_if_removed()
            if self.kvstore.may_leave:
                return
            if self.kvstore.waiting.wait_for_end() and num_workers > 1 and ended and not self.kvstore.may_leave:
                self._refresh_unedited()

        self.kvstore.survive(wait)

    def _copy_untrained_from_first(self) -> None:
        untrained = untrained_tensors(self.model, self._parameters.values())
        if self.kvstore.is_late:
            take_as_newcomer(self.kvstore, untrained)
        else:
            copy_from_first_worker(self.kvstore, untrained)

    def average_buffers(self) -> None:
        """Set floating-point buffers (BatchNorm's statistics) to their mean over the workers. All must call it."""
        if self._buffers:
            average_over_workers(self.kvstore, self._buffers)

    @property
    def clips_own_gradient(self) -> bool:
        """Whether this worker clips its gradient itself, because no other worker's is added to it."""
        return self.max_grad_norm is not None and not self._clips_on_servers

    def _clip_on_servers(self) -> None:
        """Let the servers clip the sum over the workers, when all have pushed."""
        assert self.max_grad_norm is not None
        with self.times.during(Phase.WAIT):
            norm = self.kvstore.clip(self.kvstore.slots(list(self._parameters)), self.max_grad_norm)
        self.grad_norm = torch.tensor(norm, device="cpu")

    # --- captured steps: no hook runs in a replay, so the caller moves gradients and weights

    def take_control(self) -> list[Bucket]:
        """Remove the hooks. Return the buckets, in the order in which backward finishes them.

        From now on the caller copies each bucket's gradients to the store's memory and calls `push_bucket`, and copies
        the weights from there after `wait_for_bucket`. `sync` updates the model's own parameters.
        """
        self.sync()
        self.kvstore.take_part()
        for hook in (*self._step_hooks, self._batch_size_hook):
            hook.remove()
        self._captured = True
        return self._buckets

    def push_bucket(self, bucket: Bucket, samples: int) -> None:
        """Push a bucket whose gradients are in the store's memory."""
        is_last = bucket is self._buckets[-1]
        with self.times.during(Phase.PUSH):
            bucket.push_captured(samples, more=not is_last)
        self._pushed_step = self.clock + 1
        if is_last and self._clips_on_servers:
            self._clip_on_servers()

    def wait_for_bucket(self, bucket: Bucket) -> None:
        """Wait until a bucket's new weights are in the store's memory."""
        if bucket.is_in_flight:
            self._wait(bucket)

    # --- set-up

    def _wanted_overlap(self) -> bool | None:
        if self._overlap is not None:
            return self._overlap
        if self._push_factors:
            return True  # factors exist during backward only
        if len(self.kvstore.workers) == 1:
            return False  # it hides nothing, so its loop may do anything
        on_gpu = any(parameter.device.type != "cpu" for parameter in self._parameters.values())
        size = sum(parameter.numel() * parameter.element_size() for parameter in self._parameters.values())
        return False if on_gpu and size < SMALL_ON_GPU else None

    def _make_tables(self) -> SparseTables:
        """Create keys by rows for the parameters that get sparse gradients."""
        names = find_tables(self.model, self._parameters, self.optimizer)
        check_optimizer(names, self._optimizer_spec())
        return SparseTables({name: self._parameters[name] for name in names}, self.kvstore, self._settings)

    def _optimizer_spec(self) -> OptimizerSpec:
        return spec_of(self.optimizer, {id(parameter): name for name, parameter in self._parameters.items()})

    def _make_buckets(self) -> list[Bucket]:
        """Divide the parameters into buckets and create their keys, bucket after bucket, with rank 0's values."""
        dense = {name: p for name, p in self._parameters.items() if name not in self._tables.parameters}
        if not dense:
            return []
        groups = names_by_bucket(self.model, dense, self.optimizer)
        names = [name for group in groups for name in group]
        self.kvstore.init(names, [real(self._parameters[name].detach()) for name in names])
        of_group = ({name: self._parameters[name] for name in group} for group in groups)
        return [
            Bucket(index, parameters, self.kvstore, self._settings, gated=self._clips_on_servers)
            for index, parameters in enumerate(of_group)
        ]

    def _send_optimizer(self) -> None:
        """Send the servers the optimizer."""
        spec = self._optimizer_spec()
        self.kvstore.use_optimizer(OptimizerSpec(spec.name, spec.groups, spec.members, self.max_grad_norm))

    def _initialise_servers(self) -> None:
        """Send the servers the optimizer's state, and fetch rank 0's weights.

        An optimizer that has made steps before continues with its state. As for the weights, rank 0's counts.
        """
        self._pull()
        self._tables.fetch_all()
        self._weights.move()
        state = state_of(self.optimizer, self._parameters)
        if state and self.kvstore.is_first:
            self.kvstore.put_optimizer_states(state, "the optimizer's state")
        self.kvstore.barrier()

    def _pull(self) -> None:
        if not self._names:
            return
        self.kvstore.pull(self._names, [self._bucket_of[name].weights[name] for name in self._names])
        self._weights.take(self._names)

    def _begin_edit(self) -> None:
        self.sync()
        self.kvstore.barrier()
        self._refresh_unedited()

    def _refresh_unedited(self) -> None:
        """Fetch the newest weights, except of parameters that the loop has changed since the last step."""
        edited = (*self._weights.edited(), *self._tables.edited())
        kept = {name: self._parameters[name].detach().clone() for name in edited}
        self.refresh()
        with torch.no_grad():
            for name, value in kept.items():
                self._parameters[name].copy_(value)

    def _publish_weights(self) -> None:
        """Give the servers and all workers the weights of the lowest rank."""
        self.kvstore.barrier()  # before that, a slow worker could still pull
        if self.kvstore.is_first:
            self.kvstore.overwrite(list(self._parameters), [real(p.detach()) for p in self._parameters.values()])
        self.kvstore.barrier()
        self._pull()
        self._tables.fetch_all()

    # --- hooks

    def _add_hooks(self) -> None:
        self._factorable = self._find_factorable() if self._push_factors else {}  # before the model has our hooks
        names = {id(self._parameters[name]): name for name in self._names}
        self._lazy = LazyPull(self.model, names, self._bucket_of, self._wait_if_in_flight) if self._lazy_pull else None
        if self._lazy is not None:
            sync = ModelHook(self.model, lambda *_: self.sync())
            self._hooks.append(self.model.register_state_dict_pre_hook(sync))
            self._step_hooks += self._lazy.hooks
        for name in self._names:
            hook = self._parameters[name].register_post_accumulate_grad_hook(self._make_grad_hook(name))
            self._step_hooks.append(hook)
        for name, module in self._factorable.items():
            self._step_hooks.append(self._make_factored(name, module))
        self._hooks += self._step_hooks

    def _find_factorable(self) -> dict[str, nn.Linear]:
        """Return the layers that may push factors, by the names of their weights. Each is a bucket by itself.

        The servers then do work in place of the workers. Fewer servers than workers would become the bottleneck, unless
        the network is. With `check_finite` there are none, because factors do not show whether their product is finite.
        """
        few_servers = self.kvstore.memory_is_shared and self.kvstore.num_servers < len(self.kvstore.workers)
        if few_servers or self._check_finite:
            return {}
        alone = [bucket.names[0] for bucket in self._buckets if len(bucket.names) == 1]
        return factorable_layers(self.model, {name: self._parameters[name] for name in alone})

    def _make_factored(self, name: str, module: nn.Linear) -> FactoredLinear:
        bucket = self._bucket_of[name]

        def may_take() -> bool:
            sends = self._early.is_on and not self._accumulating and self._samples_seen is not None
            return sends and not self._loses_step and name not in bucket.arrived

        return FactoredLinear(module, may_take, partial(self._push_factors_of, bucket, name))

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super()._before_forward(module, args, kwargs)
        if module.training and torch.is_grad_enabled():
            self._take_part()
        if self._lazy is not None:
            self._lazy.before_forward()

    def _make_grad_hook(self, name: str) -> Any:
        bucket = self._bucket_of[name]

        def ready(parameter: Tensor) -> None:
            if self._lazy is not None:
                self._lazy.note_gradient(name)
            if self._accumulating or self._loses_step or parameter.grad is None:
                return  # None: its factors were pushed, or it was frozen after the forward pass
            self._samples_at_backward = self._samples_seen
            if not self._early.is_on or self._samples_seen is None:
                self._watch.see(name, parameter)
                return
            if name in bucket.arrived:
                raise self._second_backward_error()
            self._begin_sending()
            self._take_gradient(bucket, name, parameter)
            self._mark_as_sent(bucket, name, parameter)
            if bucket.is_complete:
                with self.times.during(Phase.PUSH):
                    bucket.push(self._samples_seen)

        return ready

    def _samples(self, batch_size: int | None) -> int:
        if self._samples_at_backward is not None:  # a forward pass since then has no gradients (samples of a GAN)
            self._samples_seen = self._samples_at_backward
        return super()._samples(batch_size)

    # --- gradients

    @property
    def _gradients_sent(self) -> bool:
        return any(bucket.is_pushed for bucket in self._buckets)

    def _begin_sending(self) -> None:
        """Prepare the first push of a step."""
        if self._watch.begin_sending():
            self._send_edits()
            self._watch.note_weights()

    def _take_gradient(self, bucket: Bucket, name: str, parameter: Tensor) -> None:
        """Copy a finished gradient to its place in the store's memory."""
        gradient = parameter.grad
        assert gradient is not None
        if gradient.is_sparse:
            gradient = parameter.grad = as_dense(name, gradient, self._densified)
        # No forward hook may have run since the last step, for example if a part of the model was frozen.
        self._wait_if_in_flight(bucket)
        place = bucket.gradients[name]
        if gradient.data_ptr() != place.data_ptr() or not place.numel():  # all empty tensors have the same address
            place.copy_(real(gradient.detach()))
        self._check_gradient(name, place)

    def _mark_as_sent(self, bucket: Bucket, name: str, parameter: Tensor) -> None:
        """Let the loop read a gradient that is being sent: on the CPU in the store's memory, which frees its own."""
        gradient = parameter.grad
        assert gradient is not None
        on_store = gradient.device.type == "cpu" and not gradient.is_complex() and not gradient.requires_grad
        parameter.grad = self._watch.send(name, bucket.gradients[name] if on_store else gradient)
        bucket.arrived.add(name)

    def _push_factors_of(self, bucket: Bucket, name: str, left: Tensor, right: Tensor) -> None:
        """Copy the factors of a gradient to its place and push them. The bucket has no other parameter."""
        self._begin_sending()
        self._wait_if_in_flight(bucket)
        place = bucket.gradients[name].view(-1)
        place[: left.numel()].view_as(left).copy_(left)
        place[left.numel() : left.numel() + right.numel()].view_as(right).copy_(right)
        assert self._samples_seen is not None
        bucket.arrived.add(name)
        with self.times.during(Phase.PUSH):
            bucket.push(self._samples_seen, factor_rank=len(left))

    def _push_incomplete(self, bucket: Bucket, samples: int) -> None:
        """Push a bucket that backward did not complete: some of its parameters may have no gradient."""
        self._wait_if_in_flight(bucket)
        given = [name for name, parameter in bucket.parameters.items() if parameter.grad is not None]
        for name in given:
            self._take_gradient(bucket, name, bucket.parameters[name])
        bucket.push_incomplete(given, samples)

    def _replaced(self, name: str) -> bool:
        bucket, gradient = self._bucket_of[name], self._parameters[name].grad
        if name not in bucket.arrived:
            return False
        if gradient is None:
            return name not in self._factorable and name not in bucket.cleared_late
        return not isinstance(gradient, WatchedGradient)

    # --- weights

    def _send_edits(self) -> None:
        """Send weights that the loop has edited since the last step, before gradients at these weights are applied."""
        names = [*self._weights.edited(), *self._tables.edited()]
        if not names:
            return
        several = len(self.kvstore.workers) > 1
        if several and not self.kvstore.kind.lock_step:
            raise UsageError(
                f"{names[0]!r} and {len(names) - 1} more were changed outside the optimizer; under {self.kvstore.type} "
                "each worker has weights of its own; put the change into 'with trainer.edit_weights():' on all workers"
            )
        if several:
            edits = digest({name: self._parameters[name] for name in names})
            self._tables.edits = edits
            for bucket in self._buckets:
                bucket.edits = edits
        if self.kvstore.is_first:
            self.kvstore.overwrite(names, [real(self._parameters[name].detach()) for name in names])

    def _wait_if_in_flight(self, bucket: Bucket) -> None:
        if bucket.is_in_flight:
            self._wait(bucket)
            with self.times.during(Phase.PULL):
                self._weights.take(bucket.names)

    def _wait(self, bucket: Bucket) -> None:
        tickets = self._wait_for(bucket.wait)
        if bucket.index == 0:
            self._read_answers(tickets)

    def _wait_for_tables(self) -> None:
        tickets = self._wait_for(self._tables.wait)
        if not self._buckets:
            self._read_answers(tickets)

    def _wait_for(self, wait: Callable[[], list[Ticket]]) -> list[Ticket]:
        """Wait for answers. The servers held them for a part of the time; the rest is transfer and update."""
        try:
            with self.times.during(Phase.WAIT) as waited:
                tickets = wait()
        except WorkerRemoved as error:  # in the middle of a forward or backward pass: `make_step` drops the step
            self._removed = error
            return []
        held_s = max((t.response.held_s for t in tickets if isinstance(t.response, Done)), default=0.0)
        self.times.move(max(0.0, waited.seconds - held_s), Phase.WAIT, Phase.PULL)
        return tickets

    def _read_answers(self, tickets: Sequence[Ticket]) -> None:
        """Take over a request to stop, and count how stale the weights were, from the answers to a push."""
        if self._halts_at is None and self.kvstore.requests_halt(tickets):  # with `lazy_pull`, one step later
            self._halts_at = self._pushed_step + 1
        answers = [ticket.response for ticket in tickets if isinstance(ticket.response, Done)]
        if not answers:
            return  # this worker was removed
        self.staleness[max(answer.staleness for answer in answers)] += 1
        if self.kvstore.staleness_bound is not None:  # without a bound it grows, and the histogram with it
            self.rounds_ahead[max(answer.rounds_ahead for answer in answers)] += 1
