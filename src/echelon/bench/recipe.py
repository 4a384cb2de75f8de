"""The benchmark files of DLBS (config.json): the parameters that describe a distributed MXNet benchmark.

`exp.num_nodes`, `mxnet.rendezvous` and `exp.gpus` say where it runs, the others what every worker trains. `${name}` is
replaced by a parameter or an environment variable; nothing is evaluated. Sweeps (`variables`, `extensions`) are not
read here.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echelon.errors import UsageError, unknown_name

RANK = "mxnet.rank"
_DISPLAYED_BATCHES = 20  # between two lines with the speed
_REFERENCE = re.compile(r"\$\{([^${}]+)\}")
_DEFAULTS: dict[str, Any] = {
    "exp.num_nodes": 1,
    "mxnet.rendezvous": "127.0.0.1:29500",
    "exp.gpus": "",
    "exp.model": "resnet50",
    "exp.replica_batch": 16,
    "exp.num_warmup_batches": 1,
    "exp.num_batches": 100,
    "exp.dtype": "float32",
    "exp.data_dir": "",
    "mxnet.kv_store": "dist_sync",
}
_MODELS = {
    **{f"resnet{layers}": f"resnet-v1 --num-layers {layers}" for layers in (18, 34, 50, 101, 152)},
    **{f"vgg{layers}": f"vgg --num-layers {layers}" for layers in (11, 13, 16, 19)},
    "alexnet": "alexnet",
    "googlenet": "googlenet",
    "inception3": "inception-v3 --image-shape 3,299,299",
    "inception4": "inception-v4 --image-shape 3,299,299",
}


@dataclass(frozen=True, slots=True)
class Recipe:
    """A benchmark on several nodes: where they meet, and what every worker runs. `unused` are keys without effect."""

    num_nodes: int
    rendezvous: str
    command: tuple[str, ...]
    unused: tuple[str, ...]


def read_recipe(path: Path, rank: int, environment: Callable[[str], str | None]) -> Recipe:
    """Return the recipe of a file for one node. `environment` returns the value of an environment variable."""
    parameters = _expanded(_read_parameters(path), rank, environment, path)

    def number(key: str) -> int:
        return _positive(path, key, parameters[key], least=0 if key == "exp.num_warmup_batches" else 1)

    num_nodes = number("exp.num_nodes")
    gpus = str(parameters["exp.gpus"]).replace(" ", "")
    num_replicas = len(gpus.split(",")) if gpus else 1
    batch = number("exp.replica_batch") * num_replicas
    num_batches = number("exp.num_warmup_batches") + number("exp.num_batches")
    model = str(parameters["exp.model"])
    if model not in _MODELS:
        raise unknown_name(f"exp.model in {path}:", model, _MODELS)
    flags = f"--network {_MODELS[model]} --batch-size {batch} --num-examples {num_batches * batch * num_nodes}"
    words = [*flags.split(), "--num-epochs", "1", "--dtype", str(parameters["exp.dtype"])]
    words += ["--kv-store", str(parameters["mxnet.kv_store"])]
    words += ["--disp-batches", str(min(_DISPLAYED_BATCHES, number("exp.num_batches")))]  # a short run shows it, too
    words += ["--gpus", gpus] if gpus else []
    data = str(parameters["exp.data_dir"])
    words += ["--data-train", f"{data}/train.rec"] if data else ["--benchmark", "1"]
    script = path.absolute().parent / "train_imagenet.py"
    if not script.is_file():
        raise UsageError(f"{path} runs train_imagenet.py, which is not beside it; copy the file into {script.parent}")
    unused = sorted(parameters.keys() - _DEFAULTS.keys() - {RANK})
    command = (sys.executable, str(script), *words)
    return Recipe(num_nodes, str(parameters["mxnet.rendezvous"]), command, tuple(unused))


def _read_parameters(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:  # also text that is not UTF-8
        raise UsageError(f"{path} is not valid JSON: {error}") from error
    parameters = content.get("parameters") if isinstance(content, dict) else None
    if not isinstance(parameters, dict):
        raise UsageError(f'{path} has no parameters; write {{"parameters": {{"exp.num_nodes": 2, …}}}}')
    for key in ("variables", "extensions"):
        if content.get(key):
            raise UsageError(f"{path}: {key!r} describes several benchmarks, and a node runs one: remove it")
    return {**_DEFAULTS, **parameters}


def _expanded(
    parameters: Mapping[str, Any], rank: int, environment: Callable[[str], str | None], path: Path
) -> dict[str, Any]:
    """Replace `${name}` in all texts, and what the replacement refers to in turn."""
    known = {**parameters, RANK: rank}

    def expand(key: str, value: Any, using: tuple[str, ...]) -> Any:
        if not isinstance(value, str):
            return value

        def replacement(match: re.Match[str]) -> str:
            name = match[1]
            if name in using:
                raise UsageError(f"{path}: {key} refers to itself through ${{{name}}}")
            found = known[name] if name in known else environment(name)
            if found is None:
                raise UsageError(f"{path}: {key} uses ${{{name}}}, which is neither a parameter nor set in the shell")
            return str(expand(name, found, (*using, name)))

        return _REFERENCE.sub(replacement, value)

    return {key: expand(key, value, (key,)) for key, value in known.items()}


def _positive(path: Path, key: str, value: Any, least: int) -> int:
    text = str(value)
    if isinstance(value, bool) or not text.isdecimal() or int(text) < least:
        raise UsageError(f"{path}: {key} is {value!r}; it must be a whole number, {least} or more")
    return int(text)
