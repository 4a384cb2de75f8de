"""Which parameters a Trainer can have: initialised ones, and each in one Trainer at a time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from echelon.errors import UsageError

_OWNED = WeakIdKeyDictionary()  # the parameters that a Trainer has, as long as they exist


class Ownership:
    """The parameters of a Trainer, until `remove`.

    `shared`: other processes train them, too, so that a second Trainer would send the same gradients once more.
    """

    def __init__(self, parameters: Iterable[Tensor], *, shared: bool) -> None:
        self.shared = shared
        self._parameters = list(parameters)
        for parameter in self._parameters:
            _OWNED[parameter] = self

    def remove(self) -> None:
        """Let another Trainer have the parameters."""
        for parameter in self._parameters:
            if _OWNED.get(parameter) is self:
                del _OWNED[parameter]


def check_parameters(model: nn.Module, parameters: Mapping[str, Tensor]) -> None:
    """Raise UsageError if a Trainer cannot have these parameters of a model."""
    lazy = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if is_lazy(tensor)]
    if lazy:
        raise UsageError(
            f"{lazy[0]!r} has no shape yet, because its module is lazy: run one forward pass first, then create the "
            "optimizer and the Trainer"
        )
    for name, parameter in parameters.items():
        owner = _OWNED.get(parameter)
        if owner is not None and owner.shared:
            raise UsageError(
                f"{name!r} is already trained by another Trainer; close that one first (trainer.close()), or give the "
                "two optimizers different parameters"
            )
