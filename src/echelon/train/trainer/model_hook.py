"""A hook of a Trainer on a module, of which neither a copy nor a file of the module has a trace.

`copy.deepcopy(model)` and `torch.save(model)` copy the hooks of a module with it. A copy of a Trainer's hook would copy
or pickle the Trainer, or let a copy of the model take part in the training. The state of a module that has such a hook
is therefore made without it, and a file of the model has nothing that `torch.load(…, weights_only=True)` would reject.

A class may define its own state or copies. They have a function of the standard library in place of the hook, so that a
file can be loaded without Echelon.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

_STATE = "__getstate__"
_TABLES = ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_state_dict_pre_hooks")  # by the number of a hook


class ModelHook:
    """Calls `call(module, …)` for one module. As a hook of another module it does nothing."""

    def __init__(self, module: nn.Module, call: Callable[..., None]) -> None:
        self._module = module
        self._call = call
        if _has_plain_state(module):
            # Not through setattr, which wrappers of a module redirect. It stays when the hook is removed.
            vars(module)[_STATE] = partial(_state_without_hooks, weakref.ref(module))

    def __call__(self, module: nn.Module, *args: Any) -> None:
        """Handle a call of the module. The arguments depend on the kind of hook."""
        if module is self._module:
            self._call(module, *args)

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what a copy has instead, if the module's class makes the copy.

        A hook's number stays in the copied module. Unpickling a handle makes torch give later hooks higher numbers.
        """
        return getattr, (nullcontext(RemovableHandle(OrderedDict())), "__exit__")


def _has_plain_state(module: nn.Module) -> bool:
    """Return whether copies and files of a module consist of its `__dict__`."""
    kind, names = type(module), (_STATE, "__reduce__", "__reduce_ex__")
    is_plain = all(getattr(kind, name) is getattr(nn.Module, name) for name in names)
    return is_plain and not hasattr(kind, "__deepcopy__") and isinstance(nn.Module.__getstate__(module), dict)


def _state_without_hooks(reference: weakref.ref[nn.Module]) -> dict[str, Any]:
    """Return the state of a module as if it had no hook of a Trainer."""
    module = reference()
    assert module is not None
    state = {name: value for name, value in nn.Module.__getstate__(module).items() if name != _STATE}
    tables = {name: state[name] for name in _TABLES if name in state}
    ours = {number for table in tables.values() for number, hook in table.items() if isinstance(hook, ModelHook)}
    for name, table in tables.items():
        state[name] = type(table)((number, value) for number, value in table.items() if number not in ours)
    return state
