"""MXNet's optimizers as torch optimizers, with MXNet's formulas and defaults. Servers run the same update rules.

`rule` has the base classes; `momentum`, `adaptive` and `rules` the optimizers; `create` makes one by MXNet's name and
settings. To add one to the servers, write a `Rule` and add it to `RULES`. An optimizer of torch.optim needs a line in
`torch_classes.py` and, if it is not run as a class, a kernel in `server/optimizer/kernels.py`. The names that
`--optimizer` accepts are in `train/recipe/optimizers.py`.
"""

from echelon.optim.adaptive import AdaDelta, AdaGrad, Adam, Adamax, GroupAdaGrad, Nadam, RMSProp
from echelon.optim.create import create
from echelon.optim.momentum import LBSGD, NAG, SGD, LBSGDByNorm
from echelon.optim.rule import Rule
from echelon.optim.rules import DCASGD, FTML, LAMB, LARS, SGLD, Accumulate, Ftrl, Signum

RULES: dict[str, type[Rule]] = {
    "mxnet_sgd": SGD,
    "mxnet_nag": NAG,
    "mxnet_adam": Adam,
    "mxnet_adagrad": AdaGrad,
    "mxnet_rmsprop": RMSProp,
    "mxnet_adadelta": AdaDelta,
    "mxnet_adamax": Adamax,
    "mxnet_nadam": Nadam,
    "groupadagrad": GroupAdaGrad,
    "signum": Signum,
    "ftml": FTML,
    "ftrl": Ftrl,
    "dcasgd": DCASGD,
    "test": Accumulate,
    "lars": LARS,
    "lbsgd": LBSGD,
    "lbsgd_lars": LBSGDByNorm,
    "lamb": LAMB,
}  # the rules that servers run, by the name in the messages to them; mxnet_: torch.optim has one of that name, too

__all__ = [
    "DCASGD",
    "FTML",
    "LAMB",
    "LARS",
    "LBSGD",
    "NAG",
    "RULES",
    "SGD",
    "SGLD",
    "Accumulate",
    "AdaDelta",
    "AdaGrad",
    "Adam",
    "Adamax",
    "Ftrl",
    "GroupAdaGrad",
    "LBSGDByNorm",
    "Nadam",
    "RMSProp",
    "Rule",
    "Signum",
    "create",
]
