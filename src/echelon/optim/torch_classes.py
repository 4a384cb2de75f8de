"""The classes of torch.optim that servers run, by the names that KVStore.set_optimizer accepts.

LBFGS is missing: it evaluates the loss several times in a step, which only a process that trains alone can do.
"""

from __future__ import annotations

from torch import optim
from torch.optim import Optimizer

ELEMENTWISE: dict[str, type[Optimizer]] = {
    "sgd": optim.SGD,
    "adam": optim.Adam,
    "adamw": optim.AdamW,
    "adagrad": optim.Adagrad,
    "rmsprop": optim.RMSprop,
    "adadelta": optim.Adadelta,
    "adamax": optim.Adamax,
    "nadam": optim.NAdam,
    "radam": optim.RAdam,
    "asgd": optim.ASGD,
    "rprop": optim.Rprop,
}  # update every element by itself, so a server can update any part of a tensor
WHOLE: dict[str, type[Optimizer]] = {
    name.lower(): getattr(optim, name) for name in ("Adafactor", "Muon") if hasattr(optim, name)
}  # need a whole tensor: its rows and columns, its norm, or its product with itself; Muon is new in torch 2.9
ROWS_ONLY: dict[str, type[Optimizer]] = {"sparse_adam": optim.SparseAdam}  # takes sparse gradients only
TORCH: dict[str, type[Optimizer]] = ELEMENTWISE | WHOLE | ROWS_ONLY
