"""The optimizer of a server: its kernels, the progress of each lane, and the tasks of an update.

Every push carries the learning rates of its step, and the other settings if they differ from those that the optimizer
was set with. In a round of several workers, those of the lowest rank count, and all workers of the round are told of a
difference.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from echelon.cluster.messages import NO_OPTIMIZER, OptimizerSpec, Push, PushHeader, Setting
from echelon.cluster.placement import KeySpec, Layout
from echelon.errors import UsageError
from echelon.schemes import Apply, Gathered
from echelon.server.optimizer.kernel import Kernel, Progress, Step
from echelon.server.optimizer.kernels import changed_kernel, kernel_for
from echelon.server.optimizer.row_kernels import RowKernel, row_kernel_for
from echelon.server.optimizer.settings import check_settings, check_spec, try_out
from echelon.server.storage.execute import Task, Update, WeightedGradient
from echelon.server.storage.finite import Origin
from echelon.server.storage.memory import Window
from echelon.server.storage.rows import PushedRows
from echelon.server.storage.tables import RowUpdate, WeightedRows

INTEGER_KEY = "an optimizer cannot update integers"
_MAX_CACHED = 256  # kernels: a schedule of the momentum needs a new one in every step
Settings = Sequence[Mapping[str, Setting]]


@dataclass(slots=True, eq=False)
class PushedGradient:
    """A gradient that waits to be applied, and what its push says about it."""

    window: Window | PushedRows
    header: PushHeader
    push: Push | None = None  # the request and its frames, to send it to a new backup
    frames: Sequence[memoryview] = ()


def shares_of(action: Apply | Gathered) -> list[float]:
    """Return the weight of each contribution in the mean of a round."""
    total = sum(part.samples or 0.0 for part in action.contributions) + action.absent
    return [1.0 if part.samples is None else part.samples / total for part in action.contributions]


class Optimization:
    """The optimizer and its step counts. Without an optimizer, the sum of a round replaces the weights."""

    def __init__(self, layout: Layout, allowed: Collection[str] = ()) -> None:
        """`allowed`: the import paths of users' own optimizer classes that may run here."""
        self._layout = layout
        self._allowed = allowed
        self._spec: OptimizerSpec | None = None
        self._kernels: list[Kernel] = []
        self._refuses_dense = False
        self._plans: dict[int, list[tuple[int, tuple[int, ...]]]] = {}  # lane -> its keys by parameter group
        self._integer_keys: set[int] = set()
        self._num_trained: tuple[int, int] | None = None  # of this many keys, those that have an optimizer
        self._progress: dict[int, dict[int, Progress]] = {}  # lane -> parameter group -> progress of its keys
        self._variants: dict[tuple[object, ...], Kernel] = {}  # kernels by parameter group and changed settings

    @property
    def has_optimizer(self) -> bool:
        """Whether an optimizer was set."""
        return self._spec is not None

    def set_optimizer(self, spec: OptimizerSpec, *, has_pushes: bool = False) -> None:
        """Adopt the first optimizer. Later ones must be equal to it. `has_pushes`: a push waits for its round."""
        if self._spec is None:
            check_spec(spec)
            kernels = [kernel_for(spec.name, options, self._allowed) for options in spec.groups]
            for kernel in kernels:
                _try_out(spec.name, kernel)
            self._check_whole(spec, kernels)
            if has_pushes:
                raise UsageError("a push waits for its round; set the optimizer before the first push")
            self._kernels = kernels
            self._spec = spec
            self._refuses_dense = any(kernel.rows_only for kernel in kernels)
            self._plans.clear()
        elif self._spec != spec:
            raise UsageError(f"the servers run {_described(self._spec)}, but this worker set {_described(spec)}")

    def needs_whole(self, spec: KeySpec) -> bool:
        """Return whether the optimizer needs all of a new key in one place."""
        group = self._group_of(spec)
        return group != NO_OPTIMIZER and self._kernels[group].whole

    def _check_whole(self, spec: OptimizerSpec, kernels: Sequence[Kernel]) -> None:
        """Raise UsageError if the optimizer needs whole keys that were cut before it was set."""
        for slot in self._layout.slots.values() if self._layout.num_servers > 1 else ():
            group = spec.group_of(str(slot.spec.name))
            if group != NO_OPTIMIZER and kernels[group].whole and slot.server is None and not slot.spec.row_sparse:
                raise UsageError(
                    f"{spec.name} needs whole parameters, but key {slot.spec.name!r} was spread over "
                    f"{self._layout.num_servers} servers by init; call set_optimizer before init"
                )

    def add(self, key: int) -> None:
        """Add a new key, which is a lane by itself and has no updates."""
        self._progress[key] = {}
        if "float" not in self._layout.slots[key].spec.dtype:
            self._integer_keys.add(key)

    def num_trained(self, keys: Collection[int]) -> int:
        """Return how many of all keys an optimizer updates."""
        if self._num_trained is None or self._num_trained[0] != len(keys):
            self._num_trained = len(keys), sum(self._group(key) != NO_OPTIMIZER for key in keys)
        return self._num_trained[1]

    def check_keys(self, keys: Sequence[int], header: PushHeader) -> None:
        """Reject integer keys that are updated or weighted: that would fail in the middle of an update."""
        for key in self._integer_keys.intersection(keys) if self._integer_keys else ():
            if header.samples is not None or header.gated:
                raise UsageError(
                    f"key {self._layout.slots[key].spec.name!r} has integers, which are summed; push it without samples"
                )
            if self._group(key) != NO_OPTIMIZER:
                spec = self._layout.slots[key].spec
                raise UsageError(f"key {spec.name!r} is {spec}: {INTEGER_KEY}")

    def check_dense(self, keys: Sequence[int]) -> None:
        """Reject dense gradients if the optimizer takes sparse ones only."""
        if self._refuses_dense and any(self._group(key) != NO_OPTIMIZER for key in keys):
            raise UsageError("SparseAdam does not support dense gradients, please consider Adam instead")

    def check_tables(self, keys: Sequence[int], settings: Settings | None) -> None:
        """Reject rows of tables that the optimizer cannot update."""
        for key in keys:
            self.row_kernel(key, settings)

    def check_settings(self, lrs: Sequence[float], settings: Settings | None) -> None:
        """Check that a push has one learning rate per parameter group, or none, and settings that are possible."""
        for what, given in (("learning rates", lrs), ("changed settings", settings)):
            if given and len(given) != len(self._kernels):
                raise UsageError(
                    f"the push has {what} of {len(given)} parameter groups, but the optimizer has {len(self._kernels)}"
                )
        for group, changes in enumerate(settings or ()):
            self._kernel(group, changes)  # checks the changes

    def kernel(self, key: int) -> Kernel | None:
        """Return the kernel that a key's optimizer was set with, or None if the key holds plain values."""
        group = self._group(key)
        return None if group == NO_OPTIMIZER else self._kernels[group]

    def progress(self, lane: int, key: int) -> Progress:
        """Return what the optimizer has done with a key of a lane."""
        return self._progress[lane].get(self._group(key), Progress())

    def set_progress(self, lane: int, key: int, progress: Progress) -> None:
        """Replace what the optimizer has done with a key, whose states were loaded."""
        self._progress[lane][self._group(key)] = progress

    def row_kernel(self, key: int, settings: Settings | None = None) -> RowKernel | None:
        """Return the kernel that updates rows of a table, or None if the table holds plain values."""
        group = self._group(key)
        if group == NO_OPTIMIZER or self._spec is None:
            return None
        return row_kernel_for(self._spec.name, self._kernel(group, settings[group] if settings else {}))

    def tasks(self, action: Apply, keys: tuple[int, ...], pushes: Sequence[PushedGradient]) -> list[Task]:
        """Count an update of a lane and return its tasks, one for each parameter group among its keys."""
        shares = [share * action.scale for share in shares_of(action)]
        lrs, settings = pushes[0].header.lrs, pushes[0].header.settings
        before = dict(self._progress[action.key])
        origin = Origin(tuple(part.worker for part in action.contributions), action.clock)
        tasks = []
        for group, members in self._plan(action.key, keys):
            kernel = None if group == NO_OPTIMIZER else self._kernel(group, settings[group] if settings else {})
            progress = before.get(group, Progress())
            lr = self._rate(kernel, group, lrs)
            if kernel is not None:
                self._progress[action.key][group] = kernel.progress(progress, lr)
            make = self._row_update if isinstance(pushes[0].window, PushedRows) else _update
            checked = origin if kernel is not None else None  # without an optimizer, workers decide what values mean
            tasks.append(Task(members, make(kernel, pushes, shares, Step(progress, lr, action.divisor), checked), ()))
        return tasks

    def disagreement(self, ranks: Sequence[int], pushes: Sequence[PushedGradient]) -> str:
        """Return how the settings of a round's workers differ, or an empty text. Those of the first worker count."""
        first = pushes[0].header
        for rank, header in zip(ranks[1:], (pushed.header for pushed in pushes[1:]), strict=True):
            if header.lrs == first.lrs and header.settings == first.settings:
                continue
            for group in range(len(self._kernels)):
                own, other = self._settings(group, first), self._settings(group, header)
                for name in (name for name in own if own[name] != other.get(name)):
                    return (
                        f"worker {ranks[0]} has {name} {own[name]} in parameter group {group}, but worker {rank} has "
                        f"{other.get(name)} in the same step; the servers use worker {ranks[0]}'s. Give all workers "
                        "the same schedule"
                    )
        return ""

    def _settings(self, group: int, header: PushHeader) -> dict[str, Setting]:
        changes = header.settings[group] if header.settings else {}
        rate = {"lr": header.lrs[group]} if header.lrs else {}
        return {**self._kernels[group].options, **changes, **rate}

    @property
    def spec(self) -> OptimizerSpec | None:
        """The optimizer that was set."""
        return self._spec

    def to_plain(self) -> dict[int, dict[int, Any]]:
        """Return the progress of all lanes as numbers, lists and dicts."""
        return {
            lane: {group: [made.step, sorted(made.states), made.numbers] for group, made in groups.items()}
            for lane, groups in self._progress.items()
        }

    def load_plain(self, plain: dict[int, dict[int, Any]]) -> None:
        """Take over what `to_plain` returned."""
        self._plans.clear()
        self._progress = {
            lane: {
                group: Progress(step, frozenset(states), tuple((name, number) for name, number in numbers))
                for group, (step, states, numbers) in groups.items()
            }
            for lane, groups in plain.items()
        }

    def unite(self, keys: tuple[int, ...], lane: int) -> bool:
        """Merge keys into a lane. Return False if their progress differs because states were loaded."""
        found: dict[int, Progress] = {}
        for key in keys:
            progress = self.progress(key, key)
            if found.setdefault(self._group(key), progress) != progress:
                return False
        for key in keys:
            del self._progress[key]
            self._plans.pop(key, None)
        self._progress[lane] = found
        return True

    def split(self, lane: int, parts: tuple[int, ...]) -> None:
        """Replace a lane by its parts."""
        self._plans.pop(lane, None)
        progress = self._progress.pop(lane)
        self._progress |= {part: dict(progress) for part in parts}

    def _kernel(self, group: int, changes: Mapping[str, Setting]) -> Kernel:
        """Return the kernel of a parameter group. Equal settings give the same kernel."""
        known = self._kernels[group]
        if not changes:
            return known
        cached = (group, *((name, _hashable(value)) for name, value in changes.items()))
        kernel = self._variants.get(cached)
        if kernel is None:
            assert self._spec is not None
            check_settings(changes)
            kernel = changed_kernel(self._spec.name, known, changes)
            _try_out(self._spec.name, kernel)
            if len(self._variants) >= _MAX_CACHED:
                self._variants.clear()
            self._variants[cached] = kernel
        return kernel

    def _row_update(
        self,
        kernel: Kernel | None,
        pushes: Sequence[PushedGradient],
        shares: Sequence[float],
        step: Step,
        origin: Origin | None,
    ) -> RowUpdate:
        assert self._spec is not None or kernel is None
        row_kernel = row_kernel_for(self._spec.name, kernel) if self._spec is not None and kernel is not None else None
        by = step.divisor if kernel is not None and kernel.divides_gradient else 1
        rows = [pushed.window for pushed in pushes if isinstance(pushed.window, PushedRows)]
        gradients = (WeightedRows(pushed, share / by) for pushed, share in zip(rows, shares, strict=True))
        return RowUpdate(tuple(gradients), row_kernel, step, origin)

    def _rate(self, kernel: Kernel | None, group: int, lrs: Sequence[float]) -> float:
        if kernel is None:
            return 0.0
        return lrs[group] if lrs else float(kernel.options.get("lr", 0.0))

    def _plan(self, lane: int, keys: tuple[int, ...]) -> list[tuple[int, tuple[int, ...]]]:
        """Return the keys of a lane; neighbours of the same parameter group are together."""
        plan = self._plans.get(lane)
        if plan is None:
            grouped = itertools.groupby(keys, self._group)
            plan = self._plans[lane] = [(group, tuple(members)) for group, members in grouped]
        return plan

    def _group(self, key: int) -> int:
        return self._group_of(self._layout.slots[key].spec)

    def _group_of(self, spec: KeySpec) -> int:
        return NO_OPTIMIZER if self._spec is None else self._spec.group_of(str(spec.name))


def _update(
    kernel: Kernel | None,
    pushes: Sequence[PushedGradient],
    shares: Sequence[float],
    step: Step,
    origin: Origin | None,
) -> Update:
    by = step.divisor if kernel is not None and kernel.divides_gradient else 1
    windows = [pushed.window for pushed in pushes if not isinstance(pushed.window, PushedRows)]
    gradients = (WeightedGradient(window, share / by) for window, share in zip(windows, shares, strict=True))
    return Update(tuple(gradients), kernel, step, origin)


def _try_out(name: str, kernel: Kernel) -> None:
    try:
        try_out(kernel)
    except Exception as error:  # any: torch's functions fail in many ways
        raise UsageError(f"optimizer {name!r} cannot make a step with {dict(kernel.options)}: {error!r}") from error


def _described(spec: OptimizerSpec) -> str:
    groups = (", ".join(f"{name}={value}" for name, value in sorted(options.items())) for options in spec.groups)
    clipped = "" if spec.max_grad_norm is None else f" with max_grad_norm={spec.max_grad_norm:g}"
    return f"{spec.name}({'; '.join(groups)}){clipped}"


def _hashable(value: Setting) -> object:
    return tuple(value) if isinstance(value, list) else value
