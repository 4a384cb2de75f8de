"""Checkpoints: weights and buffers in a safetensors file, the optimizer's state beside it, each whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
from safetensors.torch import save_file
from torch import nn

from echelon.kvstore import KVStore

WEIGHTS = "checkpoint.safetensors"
OPTIMIZER = "optimizer.safetensors"


def save(directory: Path, model: nn.Module, kvstore: KVStore, facts: dict[str, Any]) -> Path:
    """Write rank 0's weights and buffers, and the servers' optimizer state."""
    path = directory / WEIGHTS
    tensors = {name: tensor.detach().contiguous().clone() for name, tensor in model.state_dict().items()}
    temporary = path.with_name(path.name + ".part")
    save_file(tensors, temporary, {"echelon": msgspec.json.encode(facts).decode()})
    os.replace(temporary, path)
    if kvstore.optimizer_spec is not None:  # with collectives the Trainer has the state
        kvstore.save_optimizer_states(directory / OPTIMIZER)
    return path
