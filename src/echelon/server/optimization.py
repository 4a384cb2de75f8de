"""Which optimizer runs on a server: its kernels, each lane's step count, and an update put in terms of them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from echelon.cluster.messages import OptimizerSpec
from echelon.cluster.placement import Layout
from echelon.errors import UsageError
from echelon.schemes import Apply
from echelon.server.execute import Part, Task, Update
from echelon.server.kernels import Kernel, kernel_for
from echelon.server.memory import Window

WHOLE_NUMBERS = "an optimizer cannot update whole numbers"
NO_OPTIMIZER = -1  # the group of keys that hold plain values: their sum replaces them


@dataclass(slots=True, eq=False)
class Pushed:
    """A gradient that waits to be applied. `samples` None: it counts as it is, without a share."""

    window: Window
    samples: float | None
    lrs: list[float]


class Optimization:
    """Until `agree` is called there is no optimizer, and sums replace the weights."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._spec: OptimizerSpec | None = None
        self._kernels: list[Kernel] = []
        self._plans: dict[int, list[tuple[int, tuple[int, ...]]]] = {}  # lane -> its keys by optimizer group
        self._whole: set[int] = set()  # keys of whole numbers
        self.steps: dict[int, int] = {}  # lane -> updates so far

    @property
    def chosen(self) -> bool:
        """Whether there is an optimizer."""
        return self._spec is not None

    def agree(self, spec: OptimizerSpec) -> None:
        """Take the first optimizer; any other must be the same."""
        if self._spec is None:
            kernels = [kernel_for(spec.name, options) for options in spec.groups]
            if any(kernel.whole for kernel in kernels) and self._layout.num_servers > 1:
                raise UsageError(
                    f"{spec.name} needs the norm of whole parameters, which {self._layout.num_servers} servers cut: "
                    "start the job with one server (-s 1), or use a store without servers"
                )
            self._kernels = kernels
            self._spec = spec
            self._plans.clear()
        elif self._spec != spec:
            raise UsageError(f"the servers run {_described(self._spec)}, but this worker set {_described(spec)}")

    def add(self, key: int) -> None:
        """A new key, a lane by itself, without updates so far."""
        self.steps[key] = 0
        if "float" not in self._layout.slots[key].spec.dtype:
            self._whole.add(key)

    def check_keys(self, keys: Sequence[int]) -> None:
        """A kernel would fail on whole numbers in the middle of an update, and end the server."""
        for key in self._whole.intersection(keys) if self._whole else ():
            if self._group(key) != NO_OPTIMIZER:
                spec = self._layout.slots[key].spec
                raise UsageError(f"key {spec.name!r} is {spec}: {WHOLE_NUMBERS}")

    def check_rates(self, lrs: Sequence[float]) -> None:
        """A push brings a rate for every group, or none at all."""
        if lrs and len(lrs) != len(self._kernels):
            raise UsageError(
                f"{len(lrs)} learning rates came for an optimizer of {len(self._kernels)} parameter groups"
            )

    def kernel(self, key: int) -> Kernel | None:
        """The kernel that updates a key, if one does."""
        group = self._group(key)
        return None if group == NO_OPTIMIZER else self._kernels[group]

    def tasks(self, action: Apply, keys: tuple[int, ...], pushes: Sequence[Pushed]) -> list[Task]:
        """An update of a lane as tasks, one for each optimizer group among its keys."""
        self.steps[action.key] += 1
        total = sum(part.samples for part in action.contributions)
        shares = [
            1.0 if pushed.samples is None else part.samples / total
            for part, pushed in zip(action.contributions, pushes, strict=True)
        ]
        tasks = []
        for group, members in self._plan(action.key, keys):
            kernel = None if group == NO_OPTIMIZER else self._kernels[group]
            divisor = action.gamma if kernel is not None and kernel.divides_gradient else 1
            parts = tuple(Part(p.window, share / divisor) for p, share in zip(pushes, shares, strict=True))
            lr = self._rate(kernel, group, pushes[0].lrs)
            tasks.append(Task(members, Update(parts, kernel, self.steps[action.key], lr, action.gamma), ()))
        return tasks

    def unite(self, keys: tuple[int, ...], lane: int) -> bool:
        """Keys become a lane, unless loaded states left them at different steps."""
        if len({self.steps[key] for key in keys}) > 1:
            return False
        for key in keys:
            self.steps[lane] = self.steps.pop(key)
            self._plans.pop(key, None)
        return True

    def split(self, lane: int, parts: tuple[int, ...]) -> None:
        """A lane becomes several."""
        self._plans.pop(lane, None)
        self.steps |= dict.fromkeys(parts, self.steps.pop(lane))

    def _rate(self, kernel: Kernel | None, group: int, lrs: Sequence[float]) -> float:
        if kernel is None:
            return 0.0
        return lrs[group] if lrs else float(kernel.options["lr"])

    def _plan(self, lane: int, keys: tuple[int, ...]) -> list[tuple[int, tuple[int, ...]]]:
        """A lane's keys, neighbours of the same optimizer group together."""
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
