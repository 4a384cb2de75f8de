"""The Trainer of a store on servers: gradients are pushed in buckets during backward, weights come back when needed.

The parameters move into the store's memory. When autograd has finished a gradient, a hook copies it to its place there.
When a bucket is complete it is pushed, while backward continues. The optimizer runs on the servers; the optimizer in
this process only defines which one and its settings, which are sent with every step. `step` does not wait: the next
forward pass waits for the weights of each module when it reaches the module, and so does `sync`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD

from echelon.cluster.messages import Done, OptimizerSpec
from echelon.kvstore.optimizer_spec import StepSettings, spec_of
from echelon.kvstore.servers.client import Ticket
from echelon.kvstore.servers.store import ServerStore
from echelon.server.optimization import NO_OPTIMIZER
from echelon.train.trainer.base import Hook, Trainer, flatten, unflatten
from echelon.train.trainer.buckets import names_by_bucket
from echelon.train.trainer.factors import FactoredLinear, factorable_layers
from echelon.train.trainer.guards import WatchedGradients
from echelon.train.trainer.model_hook import ModelHook
from echelon.train.trainer.optimizer_state import state_of
from echelon.train.trainer.server_buckets import Bucket
from echelon.train.trainer.sparse_rows import SparseTables, as_dense, check_optimizer, find_tables

log = logging.getLogger(__name__)

BUFFERS = "buffers"  # the name of the vectors of buffers


class ServerTrainer(Trainer, store=ServerStore):
    """Trains a model whose weights are on servers."""

    kvstore: ServerStore
    _updates_here = False

    def _start(self) -> None:
        self._called: set[str] = set()  # parameters whose module was called since the last step
        self._step_hooks: list[Hook] = []
        self._captured = False  # whether the caller moves gradients and weights, in place of the hooks
        self._loading = False
        self._pushed_step = 0  # the step that pushes in flight belong to
        self._halts_at: int | None = None  # the step after which all workers stop
        self._settings = StepSettings(self.optimizer)
        self._clips_on_servers = self.max_grad_norm is not None and self.kvstore.sums_with_others
        if self.clips_own_gradient:
            self._overlap = False  # the norm is known when all gradients are
        self._densified: set[str] = set()  # dense parameters that had a sparse gradient
        self._tables = self._make_tables()
        self._send_optimizer()  # first, because it decides how keys are placed
        self._buckets = self._make_buckets()
        for bucket in self._buckets:
            bucket.gated = self._clips_on_servers
        self._names = [name for bucket in self._buckets for name in bucket.names]
        self._parameters = {name: self._parameters[name] for name in (*self._names, *self._tables.parameters)}
        self._bucket_of = {name: bucket for bucket in self._buckets for name in bucket.names}
        self._watched = WatchedGradients({name: self._bucket_of[name].gradients[name] for name in self._names})
        self._initialise_servers()
        self._add_hooks()
        self.kvstore.on_missed_rounds = self.refresh

    # --- the loop

    def _step(self, samples: int) -> None:
        self._check_unchanged()
        if self.clips_own_gradient:
            self._clip()
        # torch's SGD adds the values of a repeated row one after the other. One worker gives the same bits.
        add_repeated = self.kvstore.num_workers > 1 or type(self.optimizer) is not SGD
        self._tables.push(samples, add_repeated=add_repeated, gated=self._clips_on_servers)
        for bucket in self._buckets:
            if not bucket.is_pushed:
                self._push_incomplete(bucket, samples)
        self._pushed_step = self.clock + 1
        if self._clips_on_servers:
            self._clip_on_servers()
        for bucket in self._buckets:
            bucket.end_step()
        self._called.clear()
        self._clear_gradients()
        self._wait_for_tables()
        self._mark_optimizer_used()

    def count(self, samples: int) -> None:
        """Do the host's part of a step: count it, report progress, and stop if all workers stop here."""
        super().count(samples)
        if self._halts_at is not None and self.clock >= self._halts_at and not self.kvstore.halted:
            self.kvstore.accept_halt()

    def sync(self) -> None:
        """Wait until every parameter has the weights of the last step."""
        for bucket in self._buckets:
            self._wait_if_in_flight(bucket)
        if self._captured:
            self._copy_weights_to_device()

    def zero_grad(self) -> None:
        """Discard gradients that were not pushed yet."""
        super().zero_grad()
        self._watched.ignore_writes_so_far()
        for bucket in self._buckets:
            bucket.discard()

    def refresh(self) -> None:
        """Fetch the weights that the servers have now, with the last pushes of all workers."""
        self.sync()
        self._pull()
        self._tables.fetch_changes()

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Load weights and buffers into the model and the servers. All workers call it."""
        self.sync()
        self._loading = True
        try:
            super().load_weights(weights)
        finally:
            self._loading = False
        if self.kvstore.rank == self.kvstore.workers[0]:
            self.kvstore.overwrite(list(self._parameters), [p.detach() for p in self._parameters.values()])
        self.kvstore.barrier()

    def optimizer_state(self) -> dict[str, Tensor]:
        """Return the servers' state as `<parameter>/<state>`."""
        self.sync()
        return self.kvstore.optimizer_states()

    def load_optimizer_state(self, state: Mapping[str, Tensor]) -> None:
        """Send the servers a state. All workers call it."""
        self.sync()
        if self.kvstore.rank == self.kvstore.workers[0]:
            self.kvstore.put_optimizer_states(dict(state), "the state")
        self.kvstore.barrier()

    def average_buffers(self) -> None:
        """Set floating-point buffers (BatchNorm's statistics) to their mean over the workers. All must call it."""
        if self._buffers:
            unflatten(self.kvstore.gather_vectors(BUFFERS, flatten(self._buffers).cpu()).mean(0), self._buffers)

    @property
    def clips_own_gradient(self) -> bool:
        """Whether this worker clips its gradient itself, because no other worker's is added to it."""
        return self.max_grad_norm is not None and not self._clips_on_servers

    def _clip_on_servers(self) -> None:
        """Let the servers clip the sum over the workers, when all have pushed."""
        assert self.max_grad_norm is not None
        began = time.perf_counter()
        norm = self.kvstore.clip(self.kvstore.slots(list(self._parameters)), self.max_grad_norm)
        self.wait_s += time.perf_counter() - began
        self.grad_norm = torch.tensor(norm)

    # --- captured steps: no hook runs in a replay, so the caller moves gradients and weights

    def take_control(self) -> list[Bucket]:
        """Remove the hooks. Return the buckets, in the order in which backward finishes them.

        From now on the caller copies each bucket's gradients to the store's memory and calls `push_bucket`, and copies
        the weights from there after `wait_for_bucket`. `sync` updates the model's own parameters.
        """
        self.sync()
        for hook in (*self._step_hooks, self._batch_size_hook):
            hook.remove()
        self._captured = True
        return self._buckets

    def push_bucket(self, bucket: Bucket, samples: int) -> None:
        """Push a bucket whose gradients are in the store's memory."""
        is_last = bucket is self._buckets[-1]
        bucket.push_captured(samples, more=not is_last)
        self._pushed_step = self.clock + 1
        if is_last and self._clips_on_servers:
            self._clip_on_servers()

    def wait_for_bucket(self, bucket: Bucket) -> None:
        """Wait until a bucket's new weights are in the store's memory."""
        if bucket.is_in_flight:
            self._wait(bucket)

    # --- set-up

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
        self.kvstore.init(names, [self._parameters[name].detach() for name in names])
        return [
            Bucket(index, {name: self._parameters[name] for name in group}, self.kvstore, self._settings)
            for index, group in enumerate(groups)
        ]

    def _send_optimizer(self) -> None:
        """Send the servers the optimizer. It does not update the vectors of buffers."""
        spec = self._optimizer_spec()
        members = spec.members | dict.fromkeys(self.kvstore.vector_names(BUFFERS), NO_OPTIMIZER)
        self.kvstore.use_optimizer(OptimizerSpec(spec.name, spec.groups, members, self.max_grad_norm))

    def _initialise_servers(self) -> None:
        """Send the servers the optimizer's state, and fetch rank 0's weights.

        An optimizer that has made steps before continues with its state. As for the weights, rank 0's counts.
        """
        if self._buffers:
            self.kvstore.make_vectors(BUFFERS, sum(buffer.numel() for buffer in self._buffers))
        self._pull()
        self._tables.fetch_all()
        for bucket in self._buckets:
            bucket.move_parameters()
        state = state_of(self.optimizer, self._parameters)
        if state and self.kvstore.rank == self.kvstore.workers[0]:
            self.kvstore.put_optimizer_states(state, "the optimizer's state")
        self.kvstore.barrier()

    def _pull(self) -> None:
        if self._names:
            self.kvstore.pull(self._names, [self._bucket_of[name].weights[name] for name in self._names])
        self._copy_weights_to_device()

    def _copy_weights_to_device(self) -> None:
        for bucket in self._buckets:
            bucket.copy_weights_to_device()

    # --- hooks

    def _add_hooks(self) -> None:
        self._factorable = self._find_factorable() if self._push_factors else {}  # before the model has our hooks
        sync, warn = ModelHook(self.model, lambda *_: self.sync()), ModelHook(self.model, self._warn_of_loading)
        self._hooks.append(self.model.register_state_dict_pre_hook(sync))
        self._hooks.append(self.model.register_load_state_dict_post_hook(warn))
        names = {id(self._parameters[name]): name for name in self._names}
        for module in self.model.modules():
            own = [names[id(p)] for p in module.parameters(recurse=False) if id(p) in names]
            if own:
                self._step_hooks.append(module.register_forward_pre_hook(self._make_wait_hook(module, own)))
        for name in self._names:
            hook = self._parameters[name].register_post_accumulate_grad_hook(self._make_grad_hook(name))
            self._step_hooks.append(hook)
        for name, module in self._factorable.items():
            self._step_hooks.append(self._make_factored(name, module))
        self._hooks += self._step_hooks

    def _warn_of_loading(self, *_: object) -> None:
        if not self._loading:
            log.warning(
                "weights were loaded into a model that has a Trainer; the servers keep their own weights, which "
                "replace these after the next step. To continue from the loaded weights, call "
                "trainer.load_weights(weights) on all workers"
            )

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
            sends = self._overlap and not self._accumulating and self._samples_seen is not None
            return sends and name not in bucket.arrived

        return FactoredLinear(module, may_take, partial(self._push_factors_of, bucket, name))

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super()._before_forward(module, args, kwargs)
        for bucket in self._buckets:
            if bucket.read_early:
                self._wait_if_in_flight(bucket)

    def _make_wait_hook(self, module: nn.Module, names: list[str]) -> ModelHook:
        indices = sorted({self._bucket_of[name].index for name in names})
        buckets = [self._buckets[index] for index in indices]

        def wait(*_: object) -> None:
            self._called.update(names)
            for bucket in buckets:
                self._wait_if_in_flight(bucket)

        return ModelHook(module, wait)

    def _make_grad_hook(self, name: str) -> Any:
        bucket = self._bucket_of[name]

        def ready(parameter: Tensor) -> None:
            if name not in self._called:  # for example nn.MultiheadAttention's out_proj: wait before all of forward
                bucket.read_early = True
            if self._accumulating or not self._overlap or self._samples_seen is None or parameter.grad is None:
                return  # None: its factors were pushed, or it was frozen after the forward pass
            if name in bucket.arrived:
                raise self._second_backward_error()
            self._take_gradient(bucket, name, parameter)
            bucket.arrived.add(name)
            if bucket.is_complete:
                bucket.push(self._samples_seen)

        return ready

    # --- gradients and weights

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
            place.copy_(gradient)
            if gradient.device.type == "cpu":
                parameter.grad = self._watched[name]
        self._check_gradient(name, place)

    def _push_factors_of(self, bucket: Bucket, name: str, left: Tensor, right: Tensor) -> None:
        """Copy the factors of a gradient to its place and push them. The bucket has no other parameter."""
        self._wait_if_in_flight(bucket)
        place = bucket.gradients[name].view(-1)
        place[: left.numel()].view_as(left).copy_(left)
        place[left.numel() : left.numel() + right.numel()].view_as(right).copy_(right)
        assert self._samples_seen is not None
        bucket.arrived.add(name)
        bucket.push(self._samples_seen, factor_rank=len(left))

    def _push_incomplete(self, bucket: Bucket, samples: int) -> None:
        """Push a bucket that backward did not complete: some of its parameters may have no gradient."""
        self._wait_if_in_flight(bucket)
        given = [name for name, parameter in bucket.parameters.items() if parameter.grad is not None]
        for name in given:
            self._take_gradient(bucket, name, bucket.parameters[name])
        bucket.push_incomplete(given, samples)

    def _wait_if_in_flight(self, bucket: Bucket) -> None:
        if bucket.is_in_flight:
            self._wait(bucket)
            bucket.copy_weights_to_device()

    def _wait(self, bucket: Bucket) -> None:
        began = time.perf_counter()
        tickets = bucket.wait()
        self.wait_s += time.perf_counter() - began
        if bucket.index == 0:
            self._read_answers(tickets)

    def _wait_for_tables(self) -> None:
        began = time.perf_counter()
        tickets = self._tables.wait()
        self.wait_s += time.perf_counter() - began
        if not self._buckets:
            self._read_answers(tickets)

    def _read_answers(self, tickets: Sequence[Ticket]) -> None:
        """Note what the answers to a push say of the job: a request to stop, and how stale the weights were."""
        if self.kvstore.requests_halt(tickets):  # some workers receive it only after the next step has begun
            self._halts_at = self._pushed_step + 1
        answers = [ticket.response for ticket in tickets if isinstance(ticket.response, Done)]
        self.staleness[max(answer.staleness for answer in answers)] += 1
        self.rounds_ahead[max(answer.rounds_ahead for answer in answers)] += 1

    # --- changes that would have no effect

    def _check_unchanged(self) -> None:
        """Raise UsageError if gradients were changed after they were pushed."""
        self._check_frozen()
        factors = any(
            name in self._bucket_of[name].arrived and self._parameters[name].grad is None for name in self._factorable
        )
        for name in self._watched.names:
            pushed = self._bucket_of[name].is_pushed
            written = self._watched.was_written(name)
            # If factors were pushed, a change of this gradient may have been meant for them, too.
            if (pushed and self._replaced(name)) or (written and (pushed or factors)):
                raise self._changed_gradient_error(name)

    def _replaced(self, name: str) -> bool:
        bucket, gradient = self._bucket_of[name], self._parameters[name].grad
        if name not in bucket.arrived:
            return False
        if gradient is None:
            return name not in self._factorable and name not in bucket.cleared_late
        return gradient.is_cpu and gradient is not self._watched[name]

    @property
    def _gradients_sent(self) -> bool:
        return any(bucket.is_pushed for bucket in self._buckets)
