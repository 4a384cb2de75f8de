"""A hook of a Trainer on a module, of which neither a copy nor a file of the module has a trace.

`copy.deepcopy(model)` and `torch.save(model)` copy the hooks of a module with it. A copy of a Trainer's hook would copy
or pickle the Trainer, or let a copy of the model take part in the training. In place of this hook, a copy therefore has
a function of the standard library that ignores its arguments, so that a file can be loaded without Echelon.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle


class ModelHook:
    """Calls `call(module, …)` for one module. As a hook of another module it does nothing."""

    def __init__(self, module: nn.Module, call: Callable[..., None]) -> None:
        self._module = module
        self._call = call

    def __call__(self, module: nn.Module, *args: Any) -> None:
        """Handle a call of the module. The arguments depend on the kind of hook."""
        if module is self._module:
            self._call(module, *args)

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what a copy has instead.

        A hook's number stays in the copied module. Unpickling a handle makes torch give later hooks higher numbers.
        """
        return getattr, (nullcontext(RemovableHandle(OrderedDict())), "__exit__")
