"""Names of optimizer states, `<key>/<state>` with torch.optim's names, and the safetensors file that holds them.

Every store uses the same names, so a state saved with one store can be loaded with any other.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as serialize
from torch import Tensor

from echelon.atomic_file import AtomicFile
from echelon.cluster.messages import NO_OPTIMIZER, OptimizerSpec
from echelon.cluster.placement import KeySpec
from echelon.errors import DataError, UsageError
from echelon.server.optimizer.class_kernels import WholeClass
from echelon.server.optimizer.kernel import Kernel
from echelon.server.optimizer.kernels import kernel_for

SCALARS = frozenset({"step", "mu_product", "eta", "mu"})  # one number per key; all other states have the key's shape


def save(path: Path, states: Mapping[str, Tensor], spec: OptimizerSpec) -> None:
    """Write states to a file, completely or not at all."""
    tensors = {name: tensor.contiguous() for name, tensor in states.items()}
    try:
        with AtomicFile(path) as file:
            file.stream.write(serialize(tensors, {"optimizer": msgspec.json.encode(spec).decode()}))
    except (OSError, SafetensorError) as error:
        raise DataError(
            f"{path}: the optimizer states could not be written ({error}); is the folder writable or the disk full?"
        ) from error


def load(path: Path, spec: OptimizerSpec) -> dict[str, Tensor]:
    """Read the states of an optimizer; those of another optimizer raise UsageError."""
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except Exception as error:
        raise DataError(f"{path}: cannot read optimizer states ({error})") from error
    saved = msgspec.json.decode(metadata.get("optimizer", "null"), type=OptimizerSpec | None)
    if saved is None or saved.name != spec.name:
        raise UsageError(f"{path} has states of {saved.name if saved else 'no optimizer'}; the servers run {spec.name}")
    return tensors


def by_key(states: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Return the states of each key. A key's name may contain a slash, a state's name does not."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor in states.items():
        key, _, kind = name.rpartition("/")
        found.setdefault(key, {})[kind] = tensor
    return found


def kernel_of(spec: OptimizerSpec, key: str) -> Kernel | None:
    """Return the servers' kernel for a key, or None if the optimizer does not update it."""
    group = spec.group_of(key)
    return None if group == NO_OPTIMIZER else kernel_for(spec.name, spec.groups[group], allowed=(spec.name,))


def check_fit(
    source: str, spec: OptimizerSpec, keys: Mapping[str, KeySpec], states: Mapping[str, Mapping[str, Tensor]]
) -> None:
    """Raise UsageError for states of unknown keys, of other optimizer settings, or of another shape.

    `keys` and `states` are by the name of the key.
    """
    for name, kinds in states.items():
        if name not in keys:
            raise UsageError(
                f"{source} has states for key {name!r}, which this job does not have; is it from another model?"
            )
        kernel = kernel_of(spec, name)
        if isinstance(kernel, WholeClass):
            continue  # keeps what it wants
        wanted = list(kernel.state_names) if kernel else []
        given = sorted(kinds.keys() - set(kernel.scalar_names if kernel else ()))
        late = kernel is not None and kernel.begins_states_late and kernel.possible_states.issuperset(given)
        if sorted(wanted) != given and not late:
            raise UsageError(f"{source}: the states {given} of key {name!r} do not fit {spec.name}, which has {wanted}")
        for kind in given:
            if kinds[kind].numel() != keys[name].length:
                raise UsageError(
                    f"{source}: state {kind} of key {name!r} has {kinds[kind].numel()} elements, "
                    f"the key has {keys[name].length}"
                )
