"""The optimizer of a server: its kernels, the step count of each lane, and the tasks of an update."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from echelon.cluster.messages import OptimizerSpec
from echelon.cluster.placement import Layout
from echelon.errors import UsageError
from echelon.schemes import Apply
from echelon.server.execute import Task, Update, WeightedGradient
from echelon.server.kernels import Kernel, kernel_for
from echelon.server.memory import Window

INTEGER_KEY = "an optimizer cannot update integers"
NO_OPTIMIZER = -1  # the group of keys with plain values: the sum of pushes replaces the value


@dataclass(slots=True, eq=False)
class PushedGradient:
    """A gradient that waits to be applied. `samples` None: it is added without a weight. `absent`: see `Push`."""

    window: Window
    samples: float | None
    lrs: list[float]
    absent: float = 0.0


class Optimization:
    """The optimizer and its step counts. Without an optimizer, the sum of a round replaces the weights."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._spec: OptimizerSpec | None = None
        self._kernels: list[Kernel] = []
        self._plans: dict[int, list[tuple[int, tuple[int, ...]]]] = {}  # lane -> its keys by parameter group
        self._integer_keys: set[int] = set()
        self.steps: dict[int, int] = {}  # lane -> updates so far

    @property
    def has_optimizer(self) -> bool:
        """Whether an optimizer was set."""
        return self._spec is not None

    def set_optimizer(self, spec: OptimizerSpec) -> None:
        """Adopt the first optimizer. Later ones must be equal to it."""
        if self._spec is None:
            kernels = [kernel_for(spec.name, options) for options in spec.groups]
            if any(kernel.whole for kernel in kernels) and self._layout.num_servers > 1:
                raise UsageError(
                    f"{spec.name} needs the norm of whole parameters, but {self._layout.num_servers} servers store "
                    "parts of them: start the job with one server (-s 1), or use a store without servers"
                )
            self._kernels = kernels
            self._spec = spec
            self._plans.clear()
        elif self._spec != spec:
            raise UsageError(f"the servers run {_described(self._spec)}, but this worker set {_described(spec)}")

    def add(self, key: int) -> None:
        """Add a new key, which is a lane by itself and has no updates."""
        self.steps[key] = 0
        if "float" not in self._layout.slots[key].spec.dtype:
            self._integer_keys.add(key)

    def check_keys(self, keys: Sequence[int]) -> None:
        """Reject integer keys, because a kernel would fail on them in the middle of an update and stop the server."""
        for key in self._integer_keys.intersection(keys) if self._integer_keys else ():
            if self._group(key) != NO_OPTIMIZER:
                spec = self._layout.slots[key].spec
                raise UsageError(f"key {spec.name!r} is {spec}: {INTEGER_KEY}")

    def check_rates(self, lrs: Sequence[float]) -> None:
        """Check that a push carries one learning rate per parameter group, or none."""
        if lrs and len(lrs) != len(self._kernels):
            raise UsageError(
                f"the push has {len(lrs)} learning rates, but the optimizer has {len(self._kernels)} parameter groups"
            )

    def kernel(self, key: int) -> Kernel | None:
        """Return the kernel that updates a key, or None if the key holds plain values."""
        group = self._group(key)
        return None if group == NO_OPTIMIZER else self._kernels[group]

    def tasks(self, action: Apply, keys: tuple[int, ...], pushes: Sequence[PushedGradient]) -> list[Task]:
        """Count an update of a lane and return its tasks, one for each parameter group among its keys."""
        self.steps[action.key] += 1
        total = sum(part.samples or 0.0 for part in action.contributions) + action.absent
        shares = [1.0 if part.samples is None else part.samples / total for part in action.contributions]
        tasks = []
        for group, members in self._plan(action.key, keys):
            kernel = None if group == NO_OPTIMIZER else self._kernels[group]
            divisor = action.divisor if kernel is not None and kernel.divides_gradient else 1
            gradients = tuple(
                WeightedGradient(pushed.window, share / divisor) for pushed, share in zip(pushes, shares, strict=True)
            )
            lr = self._rate(kernel, group, pushes[0].lrs)
            tasks.append(Task(members, Update(gradients, kernel, self.steps[action.key], lr, action.divisor), ()))
        return tasks

    def unite(self, keys: tuple[int, ...], lane: int) -> bool:
        """Merge keys into a lane. Return False if their step counts differ because states were loaded."""
        if len({self.steps[key] for key in keys}) > 1:
            return False
        for key in keys:
            self.steps[lane] = self.steps.pop(key)
            self._plans.pop(key, None)
        return True

    def split(self, lane: int, parts: tuple[int, ...]) -> None:
        """Replace a lane by its parts."""
        self._plans.pop(lane, None)
        self.steps |= dict.fromkeys(parts, self.steps.pop(lane))

    def _rate(self, kernel: Kernel | None, group: int, lrs: Sequence[float]) -> float:
        if kernel is None:
            return 0.0
        return lrs[group] if lrs else float(kernel.options["lr"])

    def _plan(self, lane: int, keys: tuple[int, ...]) -> list[tuple[int, tuple[int, ...]]]:
        """Return the keys of a lane; neighbours of the same parameter group are together."""
        plan = self._plans.get(lane)
        if plan is None:
            grouped = itertools.groupby(keys, self._group)
            plan = self._plans[lane] = [(group, tuple(members)) for group, members in grouped]
        return plan

    def _group(self, key: int) -> int:
        if self._spec is None:
            return NO_OPTIMIZER
        return self._spec.members.get(str(self._layout.slots[key].spec.name), 0)


def _described(spec: OptimizerSpec) -> str:
    groups = (", ".join(f"{name}={value}" for name, value in sorted(options.items())) for options in spec.groups)
    return f"{spec.name}({'; '.join(groups)})"
