"""The Trainer of a store on servers: gradients leave in buckets while backward runs, weights come back when needed.

Parameters move into the store's memory. A gradient is copied to its place there as soon as autograd has finished it,
and when a bucket is complete it leaves, while backward goes on. The optimizer itself runs on the servers; the one
given here only says which, with what settings, and (as its schedule moves) at what rate. `step` does not wait: the
next forward pass waits for each module's weights when it reaches the module, and so does `sync`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from echelon.cluster.messages import Done, OptimizerSpec
from echelon.errors import UsageError
from echelon.kvstore.arguments import is_finite
from echelon.kvstore.optimizer_spec import spec_of
from echelon.kvstore.servers.client import Ticket
from echelon.kvstore.servers.store import ServerStore
from echelon.server.optimization import NO_OPTIMIZER
from echelon.train.trainer.base import Hook, Trainer
from echelon.train.trainer.exchanges import Exchanges, bucketed
from echelon.train.trainer.factors import FactoredLinear, factorable_layers
from echelon.train.trainer.guards import FixedSettings, WatchedGradients
from echelon.train.trainer.replicas import state_of

log = logging.getLogger(__name__)

_BUFFERS = "buffers"


class ServerTrainer(Trainer):
    """Keeps a model in step with the servers."""

    kvstore: ServerStore

    def _start(self) -> None:
        self._called: set[str] = set()  # parameters whose module was called since the last step
        self._early: set[int] = set()  # buckets with parameters that are read without a call of their module
        self._arrived: set[str] = set()  # gradients of the step that is being made
        self._cleared: set[str] = set()  # those of them that `zero_grad` came too late for
        buckets = bucketed(self.model, self._parameters, self.optimizer)
        self._names = [name for bucket in buckets for name in bucket]
        self._parameters = {name: self._parameters[name] for name in self._names}
        self._missing = [len(bucket) for bucket in buckets]
        self._sent: list[list[Ticket] | None] = [None] * len(buckets)  # of the step that is being made
        self._used = [list(bucket) for bucket in buckets]  # those that captured steps give gradients
        self._unused: list[list[str]] = [[] for _ in buckets]  # and those known to get none
        self._flying_step = 0  # the step that buckets under way belong to
        self._step_hooks: list[Hook] = []
        self._driven = False
        self._loading = False
        self._stops_at: int | None = None  # the step after which all stop
        self._exchanges = Exchanges(self.kvstore, self.optimizer, self._parameters, buckets)
        self._watched = WatchedGradients(self._exchanges.gradients)
        self._settings = FixedSettings(self.optimizer)
        self._hand_over()
        self._hook()

    @property
    def lock_step(self) -> bool:
        """Whether every step waits for all workers."""
        return self.kvstore.type == "dist_sync"

    # --- the loop

    def _step(self, samples: int) -> None:
        self._check_unchanged()
        buckets = self._exchanges.buckets
        for index, sent in enumerate(self._sent):
            if sent is None:
                self._send_rest(index, samples)
        self._flying_step = self.clock + 1
        for index, tickets in enumerate(self._sent):
            assert tickets is not None
            self._exchanges.fly(index, tickets)
        self._sent = [None] * len(buckets)
        self._missing = [len(bucket) for bucket in buckets]
        self._arrived.clear()
        self._cleared.clear()
        self._called.clear()
        for parameter in self._parameters.values():
            parameter.grad = None
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers warn unless step() was called

    def count(self, samples: int) -> None:
        """The host's part of a step: clocks and reports, and whether all stop here."""
        super().count(samples)
        if self._stops_at is not None and self.clock >= self._stops_at and not self.kvstore.halted:
            self.kvstore.stop()

    def sync(self) -> None:
        """Wait until every parameter has the weights of the last step."""
        for index in self._exchanges.flying:
            self._wait_for(index)
        if self._driven:
            self._exchanges.take_weights(self._names)

    def zero_grad(self) -> None:
        """Forget gradients that were not pushed."""
        self._carried = 0
        for parameter in self._parameters.values():
            parameter.grad = None
        self._watched.forgive()
        self._cleared = set(self._arrived)
        for index, bucket in enumerate(self._exchanges.buckets):
            if self._sent[index] is None:
                self._arrived -= set(bucket)
                self._missing[index] = len(bucket)

    def refresh(self) -> None:
        """Fetch the weights as they are on the servers now, others' last pushes included."""
        self.sync()
        self._exchanges.pull()

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Put weights and buffers into the model and the servers. All workers call it."""
        self.sync()
        self._loading = True
        try:
            self.model.load_state_dict(weights)
        finally:
            self._loading = False
        if self.kvstore.rank == self.kvstore.workers[0]:
            self.kvstore.overwrite(self._names, [parameter.detach() for parameter in self._parameters.values()])
        self.kvstore.barrier()

    def optimizer_state(self) -> dict[str, Tensor]:
        """The servers' state, `<parameter>/<state>`."""
        self.sync()
        return self.kvstore.optimizer_states()

    def load_optimizer_state(self, state: Mapping[str, Tensor]) -> None:
        """Give the servers a state. All workers call it."""
        self.sync()
        if self.kvstore.rank == self.kvstore.workers[0]:
            self.kvstore.put_optimizer_states(dict(state), "the state")
        self.kvstore.barrier()

    def average_buffers(self) -> None:
        """Set floating-point buffers (BatchNorm's statistics) to their mean over the workers. All must call it."""
        if not self._buffers:
            return
        mine = torch.cat([buffer.detach().reshape(-1).float().cpu() for buffer in self._buffers])
        mean = self.kvstore.gather_vectors(_BUFFERS, mine).mean(0)
        at = 0
        for buffer in self._buffers:
            buffer.copy_(mean[at : at + buffer.numel()].view_as(buffer))
            at += buffer.numel()

    # --- for steps that are captured: no hook runs in a replay, so whoever replays moves the bytes

    def drive(self) -> list[list[str]]:
        """Give up the hooks; returns the parameters of each bucket, in the order in which backward finishes them.

        From now on the caller brings each bucket's gradients to their places, then calls `send`, and fetches weights
        from theirs after `receive`. The model's own parameters are renewed by `sync`.
        """
        self.sync()
        for hook in (*self._step_hooks, self._watch):
            hook.remove()
        self._driven = True
        return [list(bucket) for bucket in self._exchanges.buckets]

    def send(self, index: int, samples: int) -> None:
        """A bucket's gradients are in place: push them."""
        more = index + 1 < len(self._exchanges.buckets)
        used, unused = self._used[index], self._unused[index]
        tickets = self._exchanges.push(unused, 0, more=more or bool(used)) if unused else []
        if used:
            tickets += self._exchanges.push(used, samples, more=more)
        self._exchanges.fly(index, tickets)
        self._flying_step = self.clock + 1

    def leave_out(self, index: int, names: Sequence[str]) -> None:
        """Say of some parameters of a bucket that no step gives them a gradient."""
        self._unused[index] = list(names)
        self._used[index] = [name for name in self._exchanges.buckets[index] if name not in names]

    def has_come(self, index: int) -> bool:
        """Whether a bucket's new weights are in place by now."""
        return self._exchanges.has_come(index)

    def receive(self, index: int) -> None:
        """Wait until a bucket's new weights are in place."""
        if self._exchanges.is_flying(index):
            self._settle(index)

    # --- set-up

    def _hand_over(self) -> None:
        """Give the servers the optimizer, and take what they have: rank 0's weights."""
        spec = spec_of(self.optimizer, {id(parameter): name for name, parameter in self._parameters.items()})
        members = dict(spec.members)
        if self._buffers:
            length = sum(buffer.numel() for buffer in self._buffers)
            members |= dict.fromkeys(self.kvstore.make_vectors(_BUFFERS, length), NO_OPTIMIZER)
        self.kvstore.use_optimizer(OptimizerSpec(spec.name, spec.groups, members))
        self._exchanges.pull()
        self._exchanges.adopt()
        self._give_state()

    def _give_state(self) -> None:
        """An optimizer that has worked before goes on with what it remembers; rank 0's counts, as for the weights."""
        state = state_of(self.optimizer, self._parameters)
        if state and self.kvstore.rank == self.kvstore.workers[0]:
            self.kvstore.put_optimizer_states(state, "the optimizer's state")
        self.kvstore.barrier()

    def _hook(self) -> None:
        self._factorable = self._find_factorable() if self._push_factors else {}  # before hooks of our own are there
        self._hooks.append(self.model.register_state_dict_pre_hook(lambda *_: self.sync()))  # type: ignore[no-untyped-call]
        self._hooks.append(self.model.register_load_state_dict_post_hook(self._loaded_behind_our_back()))  # type: ignore[no-untyped-call]
        names = {id(parameter): name for name, parameter in self._parameters.items()}
        for module in self.model.modules():
            own = [names[id(p)] for p in module.parameters(recurse=False) if id(p) in names]
            if own:
                self._step_hooks.append(module.register_forward_pre_hook(self._waiter(module, own)))
        for name, parameter in self._parameters.items():
            hook = parameter.register_post_accumulate_grad_hook(self._grad_hook(name))  # type: ignore[no-untyped-call]
            self._step_hooks.append(hook)
        for name, module in self._factorable.items():
            self._step_hooks.append(self._factored(name, module))
        self._hooks += self._step_hooks

    def _loaded_behind_our_back(self) -> Any:
        def warn(module: nn.Module, _: object) -> None:
            if module is self.model and not self._loading:
                log.warning(
                    "weights were loaded into a model that has a Trainer; the servers keep theirs, which come with the "
                    "next step. To train on from these, call trainer.load_weights(weights) on all workers"
                )

        return warn

    def _find_factorable(self) -> dict[str, nn.Linear]:
        """Layers that may push factors, by the names of their weights; each is a bucket by itself.

        Servers then do what the workers are spared: fewer of them than workers would be kept busy by it, unless the
        network is what everybody waits for. Whether a product is finite is not seen in its factors.
        """
        busy = self.kvstore.memory_is_shared and self.kvstore.num_servers < len(self.kvstore.workers)
        if busy or self._check_finite:
            return {}
        alone = [bucket[0] for bucket in self._exchanges.buckets if len(bucket) == 1]
        return factorable_layers(self.model, {name: self._parameters[name] for name in alone})

    def _factored(self, name: str, module: nn.Linear) -> FactoredLinear:
        def may_take() -> bool:
            return self._overlap and not self._accumulating and self._seen is not None and name not in self._arrived

        return FactoredLinear(module, may_take, partial(self._take_factors, name))

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super()._before_forward(module, args, kwargs)
        for index in self._early:
            self._wait_if_flying(index)

    def _waiter(self, watched: nn.Module, names: list[str]) -> Any:
        buckets = sorted({self._exchanges.bucket_of[name] for name in names})

        def wait(module: nn.Module, args: Any) -> None:
            if module is not watched:
                return  # a copy, which has hooks and weights of its own
            self._called.update(names)
            for index in buckets:
                self._wait_if_flying(index)

        return wait

    def _grad_hook(self, name: str) -> Any:
        index = self._exchanges.bucket_of[name]

        def ready(parameter: Tensor) -> None:
            if name not in self._called:  # as nn.MultiheadAttention does with its out_proj: wait before all of forward
                self._early.add(index)
            if self._accumulating or not self._overlap or self._seen is None or parameter.grad is None:
                return  # None: its factors have left, or it was frozen since the forward pass
            if name in self._arrived:
                raise self._second_backward()
            self._take(name, parameter)
            self._arrived.add(name)
            self._missing[index] -= 1
            if self._missing[index] == 0:
                self._sent[index] = self._exchanges.push(self._exchanges.buckets[index], self._seen)

        return ready

    # --- gradients out, weights in

    def _take(self, name: str, parameter: Tensor) -> None:
        """Copy a finished gradient to its place."""
        gradient = parameter.grad
        assert gradient is not None
        if gradient.is_sparse:
            raise UsageError(f"the gradient of {name!r} is sparse, which no server takes: use sparse=False")
        # A model may have run no forward hook since the last step, for example of a frozen part.
        self._wait_if_flying(self._exchanges.bucket_of[name])
        place = self._exchanges.gradients[name]
        if gradient.data_ptr() != place.data_ptr() or not place.numel():  # all that is empty is at the same address
            place.copy_(gradient)
            if gradient.device.type == "cpu":
                parameter.grad = self._watched[name]
        if self._check_finite and not is_finite(place):
            raise self._not_finite(name)

    def _take_factors(self, name: str, left: Tensor, right: Tensor) -> None:
        """Put the factors of a gradient to its place, and let them leave: the bucket has no other parameter."""
        index = self._exchanges.bucket_of[name]
        self._wait_if_flying(index)
        place = self._exchanges.gradients[name].view(-1)
        place[: left.numel()].view_as(left).copy_(left)
        place[left.numel() : left.numel() + right.numel()].view_as(right).copy_(right)
        assert self._seen is not None
        self._arrived.add(name)
        self._missing[index] = 0
        self._sent[index] = self._exchanges.push([name], self._seen, factor_rank=len(left))

    def _send_rest(self, index: int, samples: int) -> None:
        """A bucket that backward did not complete: what has a gradient leaves, the rest says it has none."""
        self._wait_if_flying(index)
        bucket = self._exchanges.buckets[index]
        given = [name for name in bucket if self._parameters[name].grad is not None]
        for name in given:
            self._take(name, self._parameters[name])
        tickets = self._exchanges.push(given, samples) if given else []
        if absent := [name for name in bucket if name not in given]:
            tickets += self._exchanges.push(absent, 0)
        self._sent[index] = tickets

    def _wait_if_flying(self, index: int) -> None:
        if self._exchanges.is_flying(index):
            self._wait_for(index)

    def _wait_for(self, index: int) -> None:
        self._settle(index)
        self._exchanges.take_weights(self._exchanges.buckets[index])

    def _settle(self, index: int) -> None:
        began = time.perf_counter()
        tickets = self._exchanges.land(index)
        self.wait_s += time.perf_counter() - began
        if index == 0:
            if self.kvstore.stops_with(tickets):  # all hear that, but some not before the next step is under way
                self._stops_at = self._flying_step + 1
            self.staleness[max(t.response.staleness for t in tickets if isinstance(t.response, Done))] += 1

    # --- what may not be changed

    def _check_unchanged(self) -> None:
        """What has been sent cannot be changed any more: say so instead of training with the old values."""
        self._check_frozen()
        factors = any(name in self._arrived and self._parameters[name].grad is None for name in self._factorable)
        for name in self._watched.names:
            sent = self._sent[self._exchanges.bucket_of[name]] is not None
            written = self._watched.was_written(name)
            # With factors: what was done to this one may have been meant for those, too.
            if (sent and self._replaced(name)) or (written and (sent or factors)):
                raise self._changed_gradient(name)
        self._settings.check()

    def _replaced(self, name: str) -> bool:
        gradient = self._parameters[name].grad
        if name not in self._arrived:
            return False
        if gradient is None:
            return name not in self._factorable and name not in self._cleared
        return gradient.is_cpu and gradient is not self._watched[name]

    @property
    def _have_left(self) -> bool:
        return any(sent is not None for sent in self._sent)
