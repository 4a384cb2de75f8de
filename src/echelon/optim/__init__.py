"""MXNet's optimizers that torch.optim does not have, as torch optimizers. Servers run the same update rules.

`rules` has the base class and the optimizers. To add one to the servers, write a `Rule` and add it to `RULES`. An
optimizer of torch.optim needs a kernel in `server/kernels.py` and a line in `kvstore/optimizer_spec.py` instead. The
names that `--optimizer` accepts are in `train/recipe/optimizers.py`.
"""

from echelon.optim.rules import DCASGD, FTML, LAMB, LARS, LBSGD, SGLD, Accumulate, Ftrl, Rule, Signum

RULES: dict[str, type[Rule]] = {
    "signum": Signum,
    "ftml": FTML,
    "ftrl": Ftrl,
    "dcasgd": DCASGD,
    "test": Accumulate,
    "lars": LARS,
    "lbsgd_lars": LBSGD,
    "lamb": LAMB,
}  # the rules that servers run, by the name in the messages to them

__all__ = ["DCASGD", "FTML", "LAMB", "LARS", "LBSGD", "RULES", "SGLD", "Accumulate", "Ftrl", "Rule", "Signum"]
