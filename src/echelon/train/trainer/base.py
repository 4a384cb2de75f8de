"""What all Trainers share: the steps of a loop, the batch size, hooks, checks and reports.

    trainer = echelon.Trainer(model, optimizer, kvstore="dist_ssync", staleness=3)
    for images, labels in batches:
        loss = criterion(model(images), labels)
        loss.backward()
        trainer.step(len(images))

`optimizer.step()` does the same, except that it leaves the gradients as they are.

`Trainer(…)` returns the subclass for the kind of store. With servers (`server`), gradients are pushed and weights come
back; with `update_on_kvstore=False` (`local_update`), gradients come back and the optimizer runs in this process. With
collectives (`collective`), gradients are summed and the optimizer runs in this process. A worker of several devices
(`multi_device`) sums between its devices and pushes the result to servers.
"""

from __future__ import annotations

import operator
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from echelon.cluster.ledger.intervals import Interval
from echelon.cluster.messages import OpenLedger, Work
from echelon.cluster.shares import Groups
from echelon.environment import Job
from echelon.errors import UsageError, WorkerRemoved
from echelon.kvstore import KVStore, create
from echelon.kvstore.create import store_class
from echelon.kvstore.leases import EqualLeases, Leases
from echelon.kvstore.state_files import by_key
from echelon.kvstore.values import is_finite
from echelon.schemes.stores import StoreKind, store_kind
from echelon.train.trainer.attached import AttachedOptimizer, Closure, StateInStore
from echelon.train.trainer.clipping import check_max_norm, clip_gradients
from echelon.train.trainer.epoch_order import EpochOrder
from echelon.train.trainer.leased import LeasedBatches
from echelon.train.trainer.model_hook import ModelHook
from echelon.train.trainer.optimizer_state import load_state, state_of
from echelon.train.trainer.ownership import Ownership, check_parameters
from echelon.train.trainer.step_times import Phase, StepTimes

REPORT_S = 0.25


class Hook(Protocol):
    """A hook on a model, one of its parameters, or an optimizer."""

    def remove(self) -> None: ...


class Trainer:
    """Trains a model together with other workers.

    The methods here are those of a process that trains alone; each kind of store has a subclass that replaces them.
    """

    capturable = False  # whether `update` runs on the device alone, so that a CUDA graph can record it
    shards_optimizer = False  # whether each process holds a part of the optimizer's state

    _kinds: ClassVar[dict[type[KVStore], type[Trainer]]] = {}
    _updates_here: bool = True  # whether the optimizer runs in this process
    _with_local_update: ClassVar[type[Trainer] | None] = None  # the kind for the same store whose optimizer does
    _with_shards: ClassVar[type[Trainer] | None] = None  # the kind whose optimizer is divided among the processes

    def __init_subclass__(
        cls,
        *,
        store: type[KVStore] | None = None,
        local_update_of: type[Trainer] | None = None,
        sharded_of: type[Trainer] | None = None,
    ) -> None:
        """Register a subclass for a kind of store, or in place of another one.

        The latter for `update_on_kvstore=False`, or for stores that divide the optimizer among the processes.
        """
        if store is not None:
            Trainer._kinds[store] = cls
        if local_update_of is not None:
            local_update_of._with_local_update = cls
        if sharded_of is not None:
            sharded_of._with_shards = cls

    def __new__(
        cls,
        model: nn.Module,
        optimizer: Optimizer,
        kvstore: str | KVStore = "local",
        *,
        update_on_kvstore: bool | None = None,
        **options: Any,
    ) -> Trainer:
        """Create the registered kind for the store, unless a kind is called by its own name."""
        if cls is not Trainer:
            return super().__new__(cls)
        wanted = _store_class(kvstore)
        kind = next((kind for store, kind in Trainer._kinds.items() if issubclass(wanted, store)), None)
        if kind is None:
            raise UsageError(f"kvstore must be the name of a store or a KVStore, not {kvstore!r}")
        if update_on_kvstore is False and not kind._updates_here:
            kind = kind._kind_with_local_update(kvstore)
        if kind._with_shards is not None and _store_kind(kvstore).sharded:
            kind = kind._with_shards
        return super().__new__(kind)

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        kvstore: str | KVStore = "local",
        *,
        staleness: int | None = None,
        groups: Groups | None = None,
        lr_scale: str | None = None,
        overlap: bool | None = None,
        lazy_pull: bool = False,
        local_gradient_edits: bool = False,
        average_buffers: bool = False,
        check_finite: bool = False,
        push_factors: bool = False,
        max_grad_norm: float | None = None,
        start_equal: bool = True,
        update_on_kvstore: bool | None = None,
    ) -> None:
        """`overlap`: whether gradients are sent during backward. By default the first step shows if it can.

        `lazy_pull`: with servers, `step` does not wait for the new weights; each module waits when it is called.
        `local_gradient_edits`: with servers, this worker may change its gradients before they are summed.
        `max_grad_norm`: clip the gradient of every update by its global norm, which `step` returns.
        `start_equal`: whether frozen parameters and buffers start with rank 0's values, as trained ones always do.
        `update_on_kvstore`: whether the store runs the optimizer. By default it does if it has servers. With False, the
        servers of `dist_sync` only sum, and each worker runs its optimizer, of any class.
        """
        self._parameters, self._frozen = _optimized_parameters(model, optimizer)
        self._names = list(self._parameters)
        check_parameters(model, self._parameters)
        if isinstance(kvstore, str):
            device = self._parameters[self._names[0]].device
            kvstore = create(kvstore, staleness=staleness, groups=groups, lr_scale=lr_scale or "share", device=device)
        elif (staleness, groups, lr_scale) != (None, None, None):
            raise UsageError(
                "staleness, groups and lr_scale are only valid with the name of a store; this store has its own"
            )
        self.kvstore = kvstore
        self.model = model
        self.optimizer = optimizer
        self.clock = 0
        self._has_retired = False  # whether this worker only takes part in the steps of others
        self._clock_at_barrier = 0  # the clock when all workers last waited for each other
        self.samples_trained = 0
        self._leased: LeasedBatches | None = None  # where the samples of the steps come from
        self._clocks_beside: deque[dict[int, int]] = deque(maxlen=2)  # of other Trainers at the last batches, by store
        self._next_epoch = 0  # of `samples`
        self.epoch = 0  # of the samples that `samples` yielded last
        self.epochs: float | None = None  # of all workers together, for reports, if the loop sets it
        self.times = StepTimes()
        self.staleness: Counter[int] = Counter()  # steps by updates of others between the read and the push
        self.rounds_ahead: Counter[int] = Counter()  # steps by rounds ahead of the slowest worker
        self._overlap = overlap
        self._lazy_pull = lazy_pull
        self._local_gradient_edits = local_gradient_edits
        self._check_finite = check_finite
        self._push_factors = push_factors
        self._max_grad_norm = check_max_norm(max_grad_norm)
        self.grad_norm: Tensor | None = None  # of the last step, before it was clipped
        self._accumulating = False
        self._batch_size: int | None = None  # as `step` was told
        self._has_seen_samples = False  # in the forward pass of any step
        self._samples_seen: int | None = None  # in the batch, as the forward pass saw it
        self._samples_accumulated = 0  # of these, samples of parts whose gradients were only accumulated
        self._last_report = 0.0
        self._buffers = [b for b in model.buffers() if b.is_floating_point()] if average_buffers else []
        # Kept to be removed: the garbage collector does not see a parameter's hooks, which hold the trainer.
        self._hooks: list[Hook] = []
        self._start_equal = start_equal
        self._start()
        if start_equal:
            self._copy_untrained_from_first()
        shared = kvstore.num_workers > 1 or not self._updates_here
        self._hooks.append(Ownership(self._parameters.values(), shared=shared))
        self._attached = AttachedOptimizer(
            optimizer,
            self._end_step,
            updates_here=self._updates_here,
            needs_unscaled=self.max_grad_norm is not None,
        )
        self._hooks.append(self._attached)
        self._state_in_store = None if self._updates_here else StateInStore(optimizer, self._parameters, self)
        if self._state_in_store is not None:
            self._hooks.append(self._state_in_store)
        self._batch_size_hook = self._add_batch_size_hook()
        self._hooks.append(self._batch_size_hook)

    def _add_batch_size_hook(self) -> Hook:
        before_forward = ModelHook(self.model, self._before_forward)
        try:
            return self.model.register_forward_pre_hook(before_forward, with_kwargs=True)
        except RuntimeError as error:  # torch.jit.ScriptModule takes no hooks
            raise UsageError(
                f"{type(self.model).__name__} takes no hooks, but a Trainer needs one on its model; give the Trainer a "
                "module that calls it (torch.nn.Sequential(model)), or script the model after training"
            ) from error

    @classmethod
    def _kind_with_local_update(cls, kvstore: str | KVStore) -> type[Trainer]:
        name = kvstore if isinstance(kvstore, str) else kvstore.type
        if not _store_kind(kvstore).lock_step:
            raise UsageError(
                f"update_on_kvstore=False needs workers in lock-step, but those of {name} update the servers' weights "
                "at their own pace; leave it out, or use dist_sync"
            )
        if cls._with_local_update is None:
            raise UsageError(
                f"update_on_kvstore=False is not possible with servers and several devices per worker ({name}); use "
                "dist_device_sync, which sums over all devices without servers and updates in each process"
            )
        return cls._with_local_update

    @property
    def max_grad_norm(self) -> float | None:
        """The norm that gradients are clipped to. It cannot change, because all workers must have the same."""
        return self._max_grad_norm

    @property
    def wait_s(self) -> float:
        """The seconds for which this worker waited for others."""
        return self.times.of(Phase.WAIT)

    # --- the loop

    def step(self, batch_size: int | None = None) -> Tensor | None:
        """End a step as `optimizer.step()` does, then clear the gradients.

        `batch_size` defaults to that of the forward pass. If there is none, all workers count the same. With
        `max_grad_norm`, return the norm of the gradient before it was clipped.
        """
        if self._accumulating:
            return None
        self._batch_size = batch_size
        try:
            self.optimizer.step()
        finally:
            self._batch_size = None
        self._clear_gradients()
        return self.grad_norm

    def make_step(self, samples: int) -> None:
        """Exchange gradients, update the weights and count the step."""
        if self._leased is not None:
            has_forward = not self._samples_accumulated or self._samples_seen != self._samples_accumulated
            self._leased.begin_step(adds_batch=has_forward)
            if self._reads_ahead:
                self._note_clocks_beside()
            if self._leased.loses_step:
                with self._without_gradients():
                    self._make_step(0)
                return
        self._make_step(samples)

    def _make_step(self, samples: int) -> None:
        self._step(samples)
        self.count(samples)
        if self._leased is not None:
            self._leased.stepped(is_applied=self._is_applied)

    def _end_step(self, closure: Closure | None) -> Any:
        """Do what `optimizer.step(closure)` does."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self._accumulating:
            self.make_step(self._samples(self._batch_size))
        return loss

    def count(self, samples: int) -> None:
        """Do the host's part of a step: count it and report progress."""
        self.clock += 1
        self.samples_trained += samples
        self.times.end_step()
        self._samples_seen, self._samples_accumulated = None, 0
        if time.monotonic() - self._last_report >= REPORT_S:
            self.report()

    @contextmanager
    def accumulate(self, *, batches: int | None = None) -> Iterator[None]:
        """For batches in several parts: inside, backward only adds to the gradients and `step` does nothing.

        `batches`: how many batches of a LeaseSampler are used up inside: 0 for a part of a batch that is not its last
        one. By default it is one batch, and the forward passes must have seen as many samples as it has.
        """
        before = self._samples_accumulated
        self._accumulating = True
        try:
            yield
        finally:
            self._accumulating = False
        if self._leased is not None:
            self._leased.accumulated(batches, self._samples_accumulated - before)

    # --- which samples

    @property
    def stopped(self) -> str | None:
        """Why this worker trains no more samples, although there are some: it was told to end, or all workers were."""
        return None

    def samples(
        self, num_samples: int, batch_size: int, *, epochs: int = 1, seed: int = 0, shuffle: bool = True
    ) -> Iterator[Tensor]:
        """Yield the indices of the samples of each step of this worker, as int64 tensors on the CPU.

        Over all workers, each index of 0 … num_samples - 1 comes once per epoch, also when workers are lost or join.
        With servers, faster workers get more, except in lock-step (`dist_sync`). The step after a batch trains it. A
        batch without a step counts as trained with the next one. All workers call this with the same arguments.

        With servers, SIGTERM ends the iteration after the step at hand (`stopped`), unless the program handles it.
        """
        order = EpochOrder(num_samples, seed, shuffle)
        return self._indices(self._lease_epochs(num_samples, batch_size, epochs, order, reads_ahead=False), order)

    def _indices(self, leased: LeasedBatches, order: EpochOrder) -> Iterator[Tensor]:
        try:
            while not self.stopped and (batch := leased.take()) is not None:
                self.epoch = batch.epoch
                self._note_clocks_beside()
                yield order.indices(batch)
        finally:
            self.end_leases()

    def _lease_epochs(
        self, num_samples: int, batch_size: int, epochs: int, order: EpochOrder, *, reads_ahead: bool
    ) -> LeasedBatches:
        """Lease the next epochs. Calls one after the other count the epochs on, so that each has its own order."""
        first, self._next_epoch = self._next_epoch, self._next_epoch + _whole(epochs)
        self._handle_sigterm()
        leased = self.lease(
            num_samples,
            batch_size,
            num_epochs=self._next_epoch,
            epoch=first,
            reads_ahead=reads_ahead,
            order=order.description,
        )
        leased.leases.is_interrupted = lambda: self.stopped is not None
        return leased

    def end_leases(self) -> None:
        """End the use of `samples` or of a LeaseSampler: return what no step has used."""
        self.close_leases()

    def _handle_sigterm(self) -> None:
        """Let SIGTERM end the iteration over samples, if the others can train on without this worker."""

    def lease(
        self,
        num_samples: int,
        batch_size: int,
        *,
        num_epochs: int,
        epoch: int = 0,
        done: Sequence[Interval] = (),
        by_speed: bool = False,
        max_batch: int = 0,
        reads_ahead: bool = True,
        order: str = "",
        complete_every: int = 0,
    ) -> LeasedBatches:
        """Return the batches that this worker trains, as positions of an epoch's order. The steps use them in order.

        The epochs are those from `epoch` to before `num_epochs`, without the positions `done`, which count from the
        start of the first one. `max_batch`: no batch has more samples with `by_speed`. `order` describes the order; the
        scheduler refuses a worker whose order is another one. `complete_every`: see `OpenLedger`.
        """
        if self._leased is not None:
            raise UsageError("samples() and LeaseSampler cannot be used twice at the same time with one Trainer")
        if _whole(num_samples) < 1 or _whole(batch_size) < 1:
            raise UsageError(f"there must be samples and a batch size, not {num_samples} and {batch_size}")
        opened = OpenLedger(
            0,
            num_samples,
            batch_size,
            num_epochs,
            epoch,
            list(done),
            by_speed=by_speed,
            order=order,
            max_batch=max_batch,
            complete_every=complete_every,
        )
        self._leased = LeasedBatches(self._open_leases(opened), self, reads_ahead=reads_ahead)
        self._clocks_beside.clear()
        return self._leased

    def close_leases(self) -> None:
        """Return the samples that no step has used, so that other workers train them. Without leases, do nothing."""
        if self._leased is not None:
            leased, self._leased = self._leased, None
            leased.close()

    def skip_batch(self) -> None:
        """Train no gradient of the batch at hand; it counts as used. Other workers do not have to skip theirs."""
        if self._leased is not None and self._leased.has_accumulated:
            self._leased.accumulated(1)  # with the step that uses the gradients so far
        else:
            self.make_empty_step()

    def make_empty_step(self) -> None:
        """Take part in a step of all workers without a gradient."""
        with self._without_gradients():
            self.make_step(0)

    def make_empty_round(self) -> None:
        """Make an empty step that others have samples for, with all Trainers of this worker that have the round.

        The steps are made at the same time, because another worker may make them in any order.
        """
        counts = {trainer: self._steps_per_batch(trainer) for trainer in self._beside()}
        with ThreadPoolExecutor(1 + len(counts)) as pool:
            others = [pool.submit(trainer._make_empty_steps, count) for trainer, count in counts.items()]
            self._make_empty_steps(1)
        for other in others:
            other.result()
        if not self._reads_ahead:
            self._note_clocks_beside()  # so that the next empty round finds the same counts
            for trainer, count in counts.items():
                self._clocks_beside[-1][trainer.kvstore.number] = trainer.clock - count

    def _make_empty_steps(self, count: int) -> None:
        """Make empty steps between batches, of which some may be accumulated for one step."""
        samples = self._samples_seen, self._samples_accumulated
        for _ in range(count):
            self.make_empty_step()
        self._samples_seen, self._samples_accumulated = samples

    def _beside(self) -> list[Trainer]:
        """Return the other Trainers of this worker in whose rounds all workers wait for it, too."""
        return []

    def _steps_per_batch(self, other: Trainer) -> int:
        """Return how many steps of another Trainer the loop has made for the last batch of this one.

        If batches are read ahead, the loop may not have made them yet, so those of the batch before count. One step is
        assumed if there was none.
        """
        number = other.kvstore.number
        clocks = [known[number] for known in self._clocks_beside if number in known]
        if not self._reads_ahead:
            return other.clock - clocks[-1] if clocks else 1
        return clocks[-1] - clocks[0] if len(clocks) > 1 else 1

    @property
    def _reads_ahead(self) -> bool:
        return self._leased is not None and self._leased.reads_ahead

    def _note_clocks_beside(self) -> None:
        self._clocks_beside.append({trainer.kvstore.number: trainer.clock for trainer in self._beside()})

    @contextmanager
    def _without_gradients(self) -> Iterator[None]:
        """Set the gradients aside."""
        gradients = {name: parameter.grad for name, parameter in self._parameters.items()}
        self._clear_gradients()
        try:
            yield
        finally:
            for name, gradient in gradients.items():
                self._parameters[name].grad = gradient

    @property
    def next_clock(self) -> int:
        """The clock of the next step in the store."""
        return self.clock

    def set_work(self, work: list[Work]) -> None:
        """Say which samples the next step uses."""

    def join_again(self, error: WorkerRemoved) -> None:
        """Join the job again, after the scheduler removed this worker."""
        raise error

    @property
    def _is_applied(self) -> bool:
        """Whether the last step is applied when `_step` has returned."""
        return True

    def _open_leases(self, opened: OpenLedger) -> Leases:
        return EqualLeases(opened, self.kvstore.workers, self.kvstore.rank)

    def close(self) -> None:
        """Wait for the last step, remove the hooks and close the store. The model keeps its weights.

        It returns when all workers have closed their Trainers or left, and the weights then have everybody's updates.
        """
        self.sync()
        if not self.kvstore.is_closed:
            self.close_leases()
            with self.times.during(Phase.WAIT):
                self._wait_for_others()
            if self._state_in_store is not None:
                self._state_in_store.bring_home()
        self.remove_hooks()
        self.report()
        self.kvstore.close()

    def not_finite(self) -> str | None:
        """Return which weights of the model have NaN or infinity, as a text; None if all are finite."""
        bad = [name for name, parameter in self._parameters.items() if not is_finite(parameter.detach())]
        if not bad:
            return None
        return f"{len(bad)} of {len(self._parameters)} weights have NaN or infinity, for example {bad[0]!r}"

    def all_reduce(self, value: Any, op: str = "mean") -> Any:
        """Return the mean, sum, max or min over the workers of a tensor or a number, for example a metric.

        All workers that train call it together; those that have retired or closed are not waited for.
        """
        return self.kvstore.all_reduce(value, op)

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all workers, by rank: tensors of any shapes, numbers, or what JSON can hold.

        All workers that train call it together; those that have retired or closed are not waited for.
        """
        return self.kvstore.gather(value)

    def remove_hooks(self) -> None:
        """Remove all hooks from the model."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()

    # --- what the kinds replace

    def update(self) -> None:
        """Do the device's part of a step, if it is `capturable`; `count` does the host's part."""
        if not self.capturable:
            raise UsageError(f"{self.kvstore.type} communicates in every step: call step() instead of update()")
        self._clip()
        self._attached.run()

    def sync(self) -> None:
        """Wait until every parameter has the weights of the last step."""

    @contextmanager
    def edit_weights(self) -> Iterator[None]:
        """Change weights outside the optimizer. All workers call it, and get the values of the lowest rank.

        On entry every worker has the newest weights, with the pushes of all workers.
        """
        self._begin_edit()
        yield
        self._publish_weights()

    def refresh(self) -> None:
        """Fetch the newest weights, with the last pushes of all workers."""

    def zero_grad(self) -> None:
        """Discard gradients that were not sent yet."""
        self._samples_accumulated = 0
        self._clear_gradients()

    def average_buffers(self) -> None:
        """Set floating-point buffers (BatchNorm's statistics) to their mean over the workers. All must call it."""

    def sum_over_devices(self, sums: Tensor) -> Tensor:
        """Return the sums over all devices that make steps together, on the CPU. All call it after the same step."""
        return sums.to("cpu", copy=True)

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Load weights and buffers into the model and the store. All workers call it."""
        self.model.load_state_dict(weights)

    def optimizer_state(self) -> dict[str, Tensor]:
        """Return the optimizer's state as whole tensors on the CPU, as `<parameter>/<state>`.

        The devices of a worker call it together; with `shards_optimizer`, all workers do.
        """
        return state_of(self.optimizer, self._parameters)

    def load_optimizer_state(self, state: Mapping[str, Tensor]) -> None:
        """Load what `optimizer_state` returned, under any store. All workers call it with the same state."""
        load_state(self.optimizer, self._parameters, by_key(state))

    def _begin_edit(self) -> None:
        """Wait until all workers are here and have the newest weights."""

    def _publish_weights(self) -> None:
        """Give the weights of the lowest rank to all workers and to the store."""

    def _start(self) -> None:
        """Set up what a kind needs. The store is connected; the model has no hooks yet."""

    def _wait_for_others(self) -> None:
        """Wait until no worker makes steps any more, and fetch the weights that this leaves."""
        self.kvstore.on_retire()

    def _copy_untrained_from_first(self) -> None:
        """Give frozen parameters and buffers the values of the first worker, if the kind did not do it in `_start`."""

    def _step(self, samples: int) -> None:
        for name, parameter in self._parameters.items():
            self._check_gradient(name, parameter.grad)
        self.update()

    @property
    def _gradients_sent(self) -> bool:
        """Whether gradients of the current step were already sent."""
        return False

    # --- batch sizes

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            return  # a whole step that is compiled passes its batch size to step()
        first = next((a for a in (*args, *kwargs.values()) if isinstance(a, Tensor) and a.ndim), None)
        if first is not None and torch.is_grad_enabled() and module.training:
            self._samples_seen = first.shape[0] + self._samples_accumulated
            self._has_seen_samples = True
            if self._accumulating:
                self._samples_accumulated = self._samples_seen

    def _samples(self, batch_size: int | None) -> int:
        if batch_size is None:
            if self._samples_seen is None and self._has_seen_samples:
                raise UsageError(
                    "step() could not infer the batch size because no training-mode forward pass has run since the "
                    "last step; pass it: trainer.step(batch_size)"
                )
            return 1 if self._samples_seen is None else self._samples_seen
        batch_size = _whole(batch_size)
        if self._samples_seen is not None and batch_size != self._samples_seen and self._gradients_sent:
            raise UsageError(
                f"step({batch_size}), but the forward pass saw {self._samples_seen} samples, and gradients were sent "
                "with that number; pass Trainer(overlap=False) if the first dimension of the input is not the batch"
            )
        return batch_size

    # --- gradients

    def _clip(self) -> None:
        """Clip the gradients in this process, if `max_grad_norm` was given. In the order of the model, as loops do."""
        if self.max_grad_norm is not None:
            trained = {id(parameter) for parameter in self._parameters.values()}
            self.grad_norm = clip_gradients(
                [parameter for parameter in self.model.parameters() if id(parameter) in trained], self.max_grad_norm
            )

    def _clear_gradients(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None

    def _check_gradient(self, name: str, gradient: Tensor | None) -> None:
        """Raise UsageError if `check_finite` is on and a gradient has NaN or infinity."""
        if self._check_finite and gradient is not None and not is_finite(gradient):
            raise UsageError(
                f"worker {self.kvstore.rank}: the gradient of {name!r} at clock {self.clock} contains NaN or infinity"
            )

    def _check_frozen(self) -> None:
        """Raise UsageError if a parameter that was frozen at the start has a gradient: the store has no key for it."""
        for name, parameter in self._frozen.items():
            if parameter.grad is not None:
                raise UsageError(
                    f"{name!r} did not require a gradient when the Trainer was created, and now has one that would be "
                    "ignored; close this Trainer (trainer.close()), and create another one after requires_grad_(True)"
                )

    def _second_backward_error(self) -> UsageError:
        return UsageError(
            f"worker {self.kvstore.rank}: a second backward pass before step(), but gradients are sent during "
            "backward; use 'with trainer.accumulate():' for batches in parts, or Trainer(overlap=False)"
        )

    def _changed_gradient_error(self, name: str) -> UsageError:
        return UsageError(
            f"the gradient of {name!r} was changed after gradients were sent during backward (clipping?); "
            "use Trainer(overlap=False), which sends them in step()"
        )

    # --- reports

    def report(self) -> None:
        """Write this worker's progress to the event log."""
        self._last_report = time.monotonic()
        self.kvstore.events.write("progress", **self.progress())

    def progress(self) -> dict[str, Any]:
        """Return this worker's progress: clock, samples, where its time went, bytes, and how stale its weights were."""
        return {
            "rank": self.kvstore.worker_rank,
            "store": self.kvstore.number,
            "clock": self.clock,
            "samples": self.samples_trained,
            **({} if self.epochs is None else {"epochs": self.epochs}),
            "staleness": _as_json(self.staleness),
            "rounds_ahead": _as_json(self.rounds_ahead),
            "bytes": self.kvstore.traffic(),
            **self.times.report(),
        }


def flatten(buffers: Sequence[Tensor]) -> Tensor:
    """Return the elements of all buffers as one float32 vector."""
    return torch.cat([buffer.detach().reshape(-1).float() for buffer in buffers])


def unflatten(flat: Tensor, buffers: Sequence[Tensor]) -> None:
    """Copy the elements of a vector back into the buffers."""
    for buffer, part in zip(buffers, torch.split(flat, [buffer.numel() for buffer in buffers]), strict=True):
        buffer.copy_(part.view_as(buffer))


def _as_json(counts: Counter[int]) -> dict[str, int]:
    return {str(value): count for value, count in sorted(counts.items())}


def _store_class(kvstore: str | KVStore) -> type[KVStore]:
    """Return the class of a store, or of the store that `create` returns for a name."""
    return store_class(kvstore, Job.from_environment()) if isinstance(kvstore, str) else type(kvstore)


def _store_kind(kvstore: str | KVStore) -> StoreKind:
    return store_kind(kvstore) if isinstance(kvstore, str) else kvstore.kind


def _whole(samples: int) -> int:
    """Return a number of samples. A value like NaN or 2.5 would spoil the weights of all workers' gradients."""
    try:
        count = operator.index(samples)
    except TypeError:
        count = -1
    if count < 0:
        raise UsageError(f"step({samples}): the number of samples must be a whole number, 0 or more")
    return count


def _optimized_parameters(
    model: nn.Module, optimizer: Optimizer
) -> tuple[dict[str, nn.Parameter], dict[str, nn.Parameter]]:
    """Return the optimizer's parameters that require a gradient now, and those that do not.

    Of the former, the last layer comes first: approximately the order in which backward finishes them.
    """
    optimized = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    named = {name: p for name, p in model.named_parameters() if id(p) in optimized}
    strangers = len(optimized - {id(p) for p in model.parameters()})
    if strangers:
        raise UsageError(f"the optimizer has {strangers} parameters that do not belong to the model")
    trained = {name: p for name, p in named.items() if p.requires_grad}
    if not trained:
        raise UsageError("the optimizer has no parameter of the model that requires a gradient")
    return dict(reversed(trained.items())), {name: p for name, p in named.items() if name not in trained}
