"""A Trainer's hook on a module: it acts for that module only, and copies of the module do not have it."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from echelon.train.trainer.model_hook import ModelHook

LOAD = """
import pickle, sys, torch
model = pickle.load(open(sys.argv[1], "rb"))
calls = []
for _ in range(50):  # torch numbers hooks from 0 in each process, and one of these has the number of the saved hook
    model.register_forward_pre_hook(lambda module, args: calls.append(len(args)))
model(torch.zeros(1, 2))
assert calls == [1] * 50 and not [name for name in sys.modules if name.startswith("echelon")]
"""


class WithOwnState(nn.Linear):
    """A layer whose class defines what a file has."""

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__.copy()


def hooked(kind: type[nn.Linear] = nn.Linear) -> tuple[nn.Module, list[int]]:
    """Return a model whose forward pass records its batch size, and the list of them."""
    sizes: list[int] = []
    model = kind(2, 2)

    def note(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> None:
        sizes.append(len(args[0]))

    model.register_forward_pre_hook(ModelHook(model, note), with_kwargs=True)
    return model, sizes


@pytest.mark.parametrize("kind", [nn.Linear, WithOwnState])
def test_only_the_module_itself_is_noticed(kind: type[nn.Linear]) -> None:
    model, sizes = hooked(kind)
    for copied in (copy.copy(model), copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        copied(torch.zeros(5, 2))
    model(torch.zeros(3, 2))
    assert sizes == [3]


def test_a_saved_model_is_loaded_without_echelon_and_takes_hooks(tmp_path: Path) -> None:
    model, _ = hooked()
    path = tmp_path / "model"
    path.write_bytes(pickle.dumps(model))
    subprocess.run([sys.executable, "-c", LOAD, str(path)], check=True)


def test_a_saved_model_is_loaded_with_weights_only() -> None:
    """As PyTorch's word language model does: the file has no class or function but those of the model."""
    model, _ = hooked()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    with torch.serialization.safe_globals([nn.Linear]):
        loaded = torch.load(file)
    assert vars(loaded).keys() == vars(nn.Linear(2, 2)).keys()
    assert torch.equal(loaded.weight, model.get_parameter("weight"))


def test_copies_keep_the_hooks_of_others() -> None:
    model, _ = hooked()
    calls: list[nn.Module] = []
    model.register_forward_pre_hook(lambda module, args: calls.append(module))
    copied = copy.deepcopy(copy.deepcopy(model))
    copied(torch.zeros(1, 2))
    assert calls == [copied]
    assert len(copied._forward_pre_hooks) == 1
    assert not copied._forward_pre_hooks_with_kwargs
