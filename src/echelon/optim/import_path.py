"""A user's own optimizer class by its import path, `package.module:Class`. Classes are imported, never pickled."""

from __future__ import annotations

from collections.abc import Collection
from importlib import import_module

from torch.optim import Optimizer

from echelon.environment import import_paths
from echelon.errors import UsageError

ANYWHERE = "Trainer(update_on_kvstore=False) with dist_sync, or a store without servers, runs any class"


def is_import_path(name: str) -> bool:
    """Return whether the name of an optimizer is an import path."""
    return ":" in name


def path_of(kind: type[Optimizer]) -> str:
    """Return the import path of a class. Raise UsageError if another process could not import it."""
    where = "in the main script" if kind.__module__ == "__main__" else "inside a function"
    if kind.__module__ == "__main__" or "<locals>" in kind.__qualname__:
        raise UsageError(
            f"the servers cannot import {kind.__name__}, because it is defined {where}: move it to a module, for "
            f"example optimizers.py, and start the job with --allow-optimizer optimizers:{kind.__name__}. {ANYWHERE}"
        )
    return f"{kind.__module__}:{kind.__qualname__}"


def import_allowed(path: str, allowed: Collection[str]) -> type[Optimizer]:
    """Import a class that the launcher allows. Raise UsageError for any other, without importing anything."""
    if path not in allowed:
        raise UsageError(
            f"the optimizer {path} is not allowed on the servers: start the job with --allow-optimizer {path} "
            f"(or set ECHELON_ALLOW_OPTIMIZERS for the servers). {ANYWHERE}"
        )
    return import_class(path)


def import_class(path: str) -> type[Optimizer]:
    """Import an optimizer class."""
    module, _, names = import_paths("optimizer", path).partition(":")
    try:
        found: object = import_module(module)
        for name in names.split("."):
            found = getattr(found, name)
    except Exception as error:  # whatever the module does when it is imported
        raise UsageError(
            f"the optimizer {path} cannot be imported ({error!r}); put the folder of its module on PYTHONPATH"
        ) from error
    if not (isinstance(found, type) and issubclass(found, Optimizer)):
        raise UsageError(f"{path} is not a subclass of torch.optim.Optimizer")
    return found
