"""What an experiment runs: the flags of `echelon train`, checked as there, and its numbers of workers and servers.

Errors of the checks name flags. They are shown with the parameters that became those flags, and where those are.
"""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from echelon import models
from echelon.bench.dlbs.configuration.config import DEFAULT
from echelon.bench.dlbs.configuration.experiment import Experiment
from echelon.environment import Job
from echelon.errors import UsageError, unknown_name
from echelon.launch.node import Rendezvous, parse_rendezvous
from echelon.schemes.stores import store_kind
from echelon.train.flags.arguments import add_arguments, options_from
from echelon.train.flags.check import check_flags
from echelon.train.flags.parser import Parser
from echelon.train.recipe.options import TrainOptions
from echelon.transport.listening import LOOPBACK


@dataclass(frozen=True, slots=True)
class Network:
    """What the name of a model means. Without a shape and classes, those of ImageNet."""

    name: str
    num_layers: int | None = None
    image_shape: str = "3,224,224"
    num_classes: int = 1000


MODELS: dict[str, Network] = {
    **{f"resnet{layers}": Network("resnet-v1", layers) for layers in (18, 34, 50, 101, 152, 200, 269)},
    **{f"resnet{layers}": Network("resnet", layers, "3,28,28", 10) for layers in (20, 56, 110, 164)},
    **{f"vgg{layers}": Network("vgg", layers) for layers in (11, 13, 16, 19)},
    "inception3": Network("inception-v3", image_shape="3,299,299"),
    "inception4": Network("inception-v4", image_shape="3,299,299"),
    "inception_resnet_v2": Network("inception-resnet-v2", image_shape="3,299,299"),
    "inception-v3": Network("inception-v3", image_shape="3,299,299"),
    "mlp": Network("mlp", image_shape="1,28,28", num_classes=10),
    "lenet": Network("lenet", image_shape="1,28,28", num_classes=10),
    "digits-cnn": Network("digits-cnn", image_shape="1,8,8", num_classes=10),
    "inception-bn-28-small": Network("inception-bn-28-small", image_shape="3,28,28", num_classes=10),
    "resnet-28-small": Network("resnet-28-small", image_shape="3,28,28", num_classes=10),
}
_OPTIONS = ("num_layers", "num_classes", "image_shape")  # of exp.model_opts
_FLAGS = {  # the parameters that become one flag, and the flag
    "mxnet.kv_store": "--kv-store",
    "echelon.staleness": "--staleness",
    "echelon.groups": "--groups",
    "echelon.lr": "--lr",
    "echelon.optimizer": "--optimizer",
    "echelon.engine": "--engine",
    "echelon.pace": "--pace",
    "echelon.slow": "--slow",
    "echelon.stall": "--stall",
    "echelon.seed": "--seed",
    "exp.gpus": "--gpus",
    "mxnet.preprocess_threads": "--data-nthreads",
}
_KEYS = {flag: key for key, flag in _FLAGS.items()} | {
    "--dtype": "exp.dtype",
    "--batch-size": "exp.replica_batch",
    "--network": "exp.model",
    "--num-layers": "exp.model_opts",
    "--image-shape": "exp.model_opts",
    "--num-classes": "exp.model_opts",
    "--data-train": "exp.data_dir",
    "--num-examples": "exp.num_batches",
    "-n": "echelon.num_workers",
    "-s": "echelon.num_servers",
    "--rendezvous": "mxnet.rendezvous",
}
_FLAG = re.compile(r"(?<![\w-])(?:--[a-z][a-z-]*|-[ns])(?![\w-])")
DISPLAYED_BATCHES = 20


@dataclass(frozen=True)
class Run:
    """A checked experiment. `rendezvous` is None on one machine."""

    experiment: Experiment
    options: TrainOptions
    num_servers: int  # of all machines
    rendezvous: Rendezvous | None

    @property
    def command(self) -> list[str]:
        """The command of every worker."""
        get = self.experiment.parameters.get
        prefix = shlex.split(get("runtime.launcher") or "")
        python = get("runtime.python") or sys.executable
        return [*prefix, python, "-m", "echelon.train", msgspec.json.encode(self.options).decode()]

    @property
    def total_batches(self) -> int:
        """The batches of each worker, with the warm-up."""
        get = self.experiment.parameters
        return int(get["exp.num_warmup_batches"] + get["exp.num_batches"])


def training_words(experiment: Experiment) -> list[str]:
    """Return the flags of `echelon train` that an experiment stands for, without those of the job."""
    get = experiment.parameters.get
    network = _network(experiment)
    num_devices = max(1, experiment.parameters["exp.num_local_gpus"])
    batch = experiment.parameters["exp.replica_batch"] * num_devices
    batches = experiment.parameters["exp.num_warmup_batches"] + experiment.parameters["exp.num_batches"]
    words = ["--network", network.name, "--image-shape", network.image_shape]
    words += ["--num-classes", str(network.num_classes), "--batch-size", str(batch)]
    words += ["--num-layers", str(network.num_layers)] if network.num_layers is not None else []
    words += ["--num-examples", str(batches * batch * experiment.num_workers), "--num-epochs", "1"]
    dtype = get("exp.dtype")
    words += ["--dtype", "float32" if dtype == "float" else str(dtype)]
    words += ["--disp-batches", str(min(DISPLAYED_BATCHES, experiment.parameters["exp.num_batches"]))]
    words += ["--data-train", _records(experiment)] if get("exp.data") == "real" else ["--benchmark", "1"]
    for key, flag in _FLAGS.items():
        if get(key) not in (None, ""):
            words.append(f"{flag}={get(key)}")
    return words


def _records(experiment: Experiment) -> str:
    """Return the file with the images of an experiment on real data."""
    key = "exp.data_dir" if experiment.parameters.get("exp.data_dir") else "mxnet.data_dir"
    path = Path(experiment.parameters[key]) / "train.rec"
    if not path.is_file():
        raise UsageError(f"{experiment.where[key]}: {key}: {path} does not exist; 'echelon data' makes record files")
    return str(path)


def _network(experiment: Experiment) -> Network:
    model, where = str(experiment.parameters["exp.model"]), experiment.where["exp.model"]
    given = experiment.parameters["exp.model_opts"]
    for key in given:
        if key not in _OPTIONS:
            error = unknown_name("option of exp.model_opts", key, _OPTIONS)
            raise UsageError(f"{experiment.where['exp.model_opts']}: {error}")
    if model not in MODELS and model not in models.names() and ":" not in model:
        names = sorted({*MODELS, *models.names()})
        raise UsageError(f"{where}: {unknown_name('exp.model', model, names, 'or package.module:function')}")
    network = MODELS.get(model, Network(model))
    shape = given.get("image_shape", network.image_shape)
    return Network(
        network.name,
        given.get("num_layers", network.num_layers),
        ",".join(map(str, shape)) if isinstance(shape, list) else str(shape),
        given.get("num_classes", network.num_classes),
    )


def checked_run(experiment: Experiment) -> Run:
    """Check an experiment as `echelon train` checks its flags; raises UsageError. Imports torch."""
    where = experiment.where
    parser = Parser(prog="echelon bench")
    add_arguments(parser)
    try:
        given = parser.parse_args(training_words(experiment))
        options = options_from(given, "imagenet")
        job = Job(num_workers=experiment.num_workers, num_servers=_num_servers(experiment))
        hosts = dict.fromkeys(range(job.num_workers), LOOPBACK)
        check_flags(given, options, job, worker_hosts=hosts)
    except UsageError as error:
        raise UsageError(_with_keys(str(error), experiment)) from error
    experiment.variables  # noqa: B018  raises for a malformed one
    num_nodes = experiment.parameters["exp.num_nodes"]
    if num_nodes == 1:
        return Run(experiment, options, job.num_servers, None)
    if experiment.parameters["echelon.num_workers"] != 1:
        raise UsageError(
            f"{where['echelon.num_workers']}: echelon.num_workers is {experiment.parameters['echelon.num_workers']}, "
            f"but with exp.num_nodes {num_nodes} every machine runs one worker"
        )
    if experiment.parameters["mxnet.rank"] >= num_nodes:
        raise UsageError(
            f"{where['mxnet.rank']}: mxnet.rank is {experiment.parameters['mxnet.rank']}, but the ranks of "
            f"exp.num_nodes {num_nodes} machines go from 0 to {num_nodes - 1}"
        )
    text = str(experiment.parameters["mxnet.rendezvous"])
    nic = experiment.parameters.get("exp.node_nic")
    text = f"{nic}:{text}" if nic and text.count(":") == 1 else text
    rendezvous = parse_rendezvous(text, f"{where['mxnet.rendezvous']}: mxnet.rendezvous")
    return Run(experiment, options, job.num_servers, rendezvous)


def _num_servers(experiment: Experiment) -> int:
    """Return the servers of all machines: by default as many as workers, and none for stores without servers."""
    given: Any = experiment.parameters.get("echelon.num_servers")
    if store_kind(experiment.parameters["mxnet.kv_store"]).collective:
        return 0
    num_nodes = experiment.parameters["exp.num_nodes"]
    return int(experiment.num_workers if given is None else given * num_nodes)


def _with_keys(message: str, experiment: Experiment) -> str:
    """Return an error about flags as one about parameters, beginning with where one of them was written."""
    if message.startswith(tuple(experiment.where.values())):
        return message
    text = _FLAG.sub(lambda found: _KEYS.get(found[0], found[0]), message).replace("\n", "\\n")
    keys = [_KEYS[flag] for flag in _FLAG.findall(message) if flag in _KEYS]
    keys += [key for key in _FLAGS if _is_quoted(experiment.parameters.get(key), message)]
    given = [key for key in keys if experiment.where.get(key, DEFAULT) != DEFAULT]
    if not given:
        return f"{experiment.title}: {text}"
    where = experiment.where[given[0]]
    named = "" if given[0] in f"{where} {text}" else f"{given[0]}: "
    return f"{where}: {named}{text}"


def _is_quoted(value: Any, message: str) -> bool:
    """Return whether an error that names no flag is about this value. Short texts occur in any message."""
    return isinstance(value, str) and len(value) > 2 and value in message
