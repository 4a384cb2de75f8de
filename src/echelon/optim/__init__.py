"""Optimizers that MXNet has and torch.optim has not, as torch optimizers whose rules the servers can run, too."""

from echelon.optim.elementwise import DCASGD, FTML, Accumulate, Ftrl, Signum
from echelon.optim.layerwise import LAMB, LARS, LBSGD, SGLD
from echelon.optim.rule import Rule

RULES: dict[str, type[Rule]] = {
    "signum": Signum,
    "ftml": FTML,
    "ftrl": Ftrl,
    "dcasgd": DCASGD,
    "test": Accumulate,
    "lars": LARS,
    "lbsgd_lars": LBSGD,
    "lamb": LAMB,
}  # what servers run, by the name that is sent to them

__all__ = ["DCASGD", "FTML", "LAMB", "LARS", "LBSGD", "RULES", "SGLD", "Accumulate", "Ftrl", "Rule", "Signum"]
