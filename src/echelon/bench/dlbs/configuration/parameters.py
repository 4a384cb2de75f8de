"""The parameters of a benchmark: DLBS's keys under their names, and `echelon.*` for what DLBS does not have. Pure.

Every key has a type, a description and often a default and a domain. Keys without an effect here are accepted, so that
configurations written for DLBS run unchanged; `effect` is False for them, and a run names those that were given.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from echelon.errors import UsageError, nearest_names

_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "json": "an object",
    "list": "a list",
    "variable": "text, a number, true or false; write an object or a list as a text",
}


@dataclass(frozen=True, slots=True)
class Parameter:
    """One key. `default` None: no value, or one that is computed from other keys."""

    type: str
    default: Any
    description: str
    least: float = -math.inf
    domain: tuple[Any, ...] = ()
    pattern: str = ""
    effect: bool = True
    computed: bool = field(default=False)  # from others, unless it is given


def _whole(default: int | None, description: str, least: int) -> Parameter:
    return Parameter("int", default, description, least=least)


def _text(default: str | None, description: str, domain: Iterable[str] = ()) -> Parameter:
    return Parameter("str", default, description, domain=tuple(domain))


def _label(description: str) -> Parameter:
    return Parameter("str", None, f"{description}; a label, copied to the results")


def _unused(description: str, kind: str = "str") -> Parameter:
    return Parameter(kind, None, description, effect=False)


def _computed(kind: str, description: str) -> Parameter:
    return Parameter(kind, None, description, computed=True)


PARAMETERS: dict[str, Parameter] = {
    "exp.status": _text(
        "ok",
        "disabled: skip it; simulate: print its command; after a run: ok or failure",
        ("ok", "disabled", "simulate"),
    ),
    "exp.framework": _text("echelon", "echelon, or mxnet, whose keys are read", ("echelon", "mxnet")),
    "exp.model": _text("resnet50", "the network: a name of DLBS, of --network, or package.module:function"),
    "exp.model_opts": Parameter("json", "{}", "num_classes, num_layers and image_shape of the network"),
    "exp.phase": _text("training", "only training is measured", ("training",)),
    "exp.num_warmup_batches": _whole(1, "batches of each worker before the measured ones", 0),
    "exp.num_batches": _whole(100, "measured batches of each worker", 1),
    "exp.replica_batch": _whole(16, "samples per batch and replica: a device, or a worker without GPUs", 1),
    "exp.effective_batch": Parameter(
        "int",
        None,
        "samples per batch of all replicas together; if given, it sets exp.replica_batch (strong scaling)",
        least=1,
        computed=True,
    ),
    "exp.gpus": Parameter("str", "", 'GPUs of each worker, as "0,1"; "" for the CPU', pattern=r"|[0-9]+(,[0-9]+)*"),
    "exp.num_nodes": _whole(1, "machines; above 1, run this command on each with its own mxnet.rank", 1),
    "exp.dtype": _text("float32", "precision", ("float", "float32", "float16", "bfloat16", "auto")),
    "exp.data_dir": _text("", 'folder with train.rec; "" for synthetic data'),
    "exp.log_file": _computed("str", "log of the experiment; the default has a digest of the parameters in its name"),
    "exp.rerun": _text(
        "never", "whether an experiment that has a log runs again: never, always, onfail", ("never", "always", "onfail")
    ),
    "exp.sys_info": _text("", "what to record of the machine under hw.*: cpuinfo,meminfo,lscpu,nvidiasmi,inxi,dmi"),
    "exp.node_nic": _text("", "network interface, as the first part of mxnet.rendezvous"),
    "exp.id": _computed("str", "digest of the parameters"),
    "exp.num_local_replicas": _computed("int", "replicas of this machine"),
    "exp.num_local_gpus": _computed("int", "GPUs of this machine"),
    "exp.num_replicas": _computed("int", "replicas of all machines"),
    "exp.num_gpus": _computed("int", "GPUs of all machines"),
    "exp.device_type": _computed("str", "gpu or cpu"),
    "exp.data": _computed("str", "synthetic or real"),
    "exp.framework_title": Parameter("str", "Echelon", "a label, copied to the results"),
    "exp.framework_family": _label("family of the framework"),
    "exp.framework_ver": _computed("str", "version of Echelon"),
    "exp.framework_commit": _label("commit of the framework"),
    "exp.model_title": _computed("str", "title of the network: exp.model"),
    "exp.proj": _label("name of the project"),
    "exp.data_store": _label("where the data are: mem, local-ssd, …"),
    "exp.node_id": _label("name of the machine"),
    "exp.node_title": _label("title of the machine"),
    "exp.device_title": _label("name of the device"),
    "exp.backend": _label("backend of the framework"),
    "exp.cuda": _label("version of CUDA"),
    "exp.cudnn": _label("version of cuDNN"),
    "exp.status_msg": _label("message about the status"),
    "exp.use_tensor_core": _unused("tensor cores are used whenever the dtype allows it", "bool"),
    "exp.docker": _unused("experiments run in this environment, not in a container", "bool"),
    "exp.docker_launcher": _unused("there are no containers"),
    "exp.docker_image": _unused("there are no containers"),
    "exp.docker_args": _unused("there are no containers"),
    "exp.ignore_past_errors": _unused("exp.rerun decides", "bool"),
    "mxnet.kv_store": _text("dist_sync", "the store, as --kv-store of echelon train"),
    "mxnet.rank": _whole(0, "number of this machine, from 0", 0),
    "mxnet.rendezvous": _text("127.0.0.1:4000", "[INTERFACE:]IP:PORT of machine 0"),
    "mxnet.preprocess_threads": _whole(4, "processes that decode images of exp.data_dir", 1),
    "mxnet.data_dir": _text("", "exp.data_dir, if that is not given"),
    "mxnet.env": _text("", 'variables of all processes, as "NAME=VALUE NAME=VALUE"'),
    "mxnet.scheduler": _unused("machine 0 always runs the scheduler", "bool"),
    "echelon.num_workers": _whole(1, "workers of this machine; with several machines each has one", 1),
    "echelon.num_servers": _whole(None, "servers of this machine (default: as many as workers)", 0),
    "echelon.staleness": _whole(None, "staleness bound of dist_ssync; optional for dist_gsync", 0),
    "echelon.groups": _text("", "groups of dist_gsync, as 0,1/2, or a file"),
    "echelon.lr": Parameter("float", 0.05, "learning rate", least=0),
    "echelon.optimizer": _text("sgd", "optimizer, as --optimizer"),
    "echelon.engine": _text("auto", "how steps run: auto, eager, compile, graph"),
    "echelon.pace": Parameter("float", 0.0, "minimum seconds per step", least=0),
    "echelon.slow": _text("", "slow workers, as RANK:FACTOR of echelon.pace, for example 3:3"),
    "echelon.stall": _text("", "random slow steps, as PROBABILITY:FACTOR of echelon.pace"),
    "echelon.transport": _text("auto", "between workers and servers of one machine", ("auto", "shm", "tcp")),
    "echelon.seed": Parameter("int", 0, "seed of all random numbers"),
    "monitor.frequency": Parameter("float", 0.0, "seconds between two samples of the resources; 0: none", least=0),
    "monitor.timeseries": _unused("all series of results.use.* are recorded"),
    "monitor.pid_folder": _unused("the monitor finds the processes by itself"),
    "monitor.backend_pid_folder": _unused("the monitor finds the processes by itself"),
    "monitor.launcher": _unused("the monitor is part of the harness"),
    "runtime.launcher": _text("", "program before the workers' command, for example numactl -N 0"),
    "runtime.python": _text("", "Python of the workers (default: this one)"),
    "runtime.cuda_cache": _unused("set CUDA_CACHE_PATH by runtime.env.CUDA_CACHE_PATH"),
    "runtime.visible_gpus": _unused("exp.gpus names the GPUs"),
    "sys.plan_builder.var_order": Parameter("list", None, "order of the variables of a sweep; the last varies fastest"),
}
ENVIRONMENT = "runtime.env."  # such keys set variables of all processes
_VARIABLE = Parameter("variable", None, "an environment variable")
_CLOSED = ("echelon.",)  # every other key that begins so is an error


def parameter_of(key: str, own: Mapping[str, Parameter]) -> Parameter | None:
    """Return the parameter of a key: one of the table, one that the user defines, or None for any value."""
    return PARAMETERS.get(key) or (_VARIABLE if key.startswith(ENVIRONMENT) else own.get(key))


def convert(key: str, value: Any, where: str, parameter: Parameter) -> Any:
    """Return an expanded value in the type of its parameter, as DLBS casts it; raises UsageError if it does not fit."""
    if value is None and parameter.default is None:
        return None  # as if it were not given, for example in a sweep over [null, 3]
    found = None if value is None else _CONVERSIONS[parameter.type](value)
    if found is None:
        raise UsageError(f"{where}: {key} is {shown(value)}; it must be {_WORDS[parameter.type]}")
    if isinstance(found, int | float) and not isinstance(found, bool) and found < parameter.least:
        raise UsageError(f"{where}: {key} is {shown(value)}; it must be {parameter.least:g} or more")
    if parameter.domain and found not in parameter.domain:
        near = nearest_names(str(found), map(str, parameter.domain))
        meant = f" (did you mean {near[0]!r}?)" if near else ""
        allowed = " or ".join(map(json.dumps, parameter.domain))
        raise UsageError(f"{where}: {key} is {shown(value)}{meant}; it must be {allowed}")
    if parameter.pattern and not re.fullmatch(parameter.pattern, str(found)):
        expected = parameter.description or f"a text that matches {parameter.pattern}"
        raise UsageError(f"{where}: {key} is {shown(value)}; expected: {expected}")
    return found


def shown(value: Any) -> str:
    """Return a value as JSON, for a message; a long one is cut."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 100 else f"{text[:99]}…"


def check_key(key: str, where: str, *, referenced: bool) -> None:
    """Raise UsageError for a key that is not in the table and is probably a misspelled one.

    Others are keys of frameworks that do not run here, or a user's own, to which `${key}` may refer.
    """
    if key in PARAMETERS or key.startswith(ENVIRONMENT):
        return
    near = nearest_names(key, PARAMETERS, cutoff=0.85)
    if key.startswith(_CLOSED) or (near and not referenced):
        meant = f"; did you mean {near[0]!r}?" if near else ";"
        raise UsageError(f"{where}: unknown parameter {key!r}{meant} 'echelon bench help' lists the parameters")


def without_effect(keys: Iterable[str]) -> list[str]:
    """Return those of the given keys that have no effect here."""
    return sorted(
        key for key in keys if not (PARAMETERS[key].effect if key in PARAMETERS else key.startswith(ENVIRONMENT))
    )


def defaults() -> dict[str, Any]:
    """Return the default of every parameter that has one."""
    return {key: one.default for key, one in PARAMETERS.items() if one.default is not None}


def described(words: Iterable[str]) -> list[str]:
    """Return lines of two columns about the parameters whose key or description contains one of the words, or all."""
    wanted = [word.lower() for word in words]
    found: Mapping[str, Parameter] = {
        key: one
        for key, one in PARAMETERS.items()
        if not wanted or any(word in f"{key} {one.description}".lower() for word in wanted)
    }
    return [f"{key:<26} {_about(one)}" for key, one in found.items()]


def _about(one: Parameter) -> str:
    notes = [one.type]
    if one.default is not None:
        notes.append(f"default {json.dumps(one.default)}")
    if one.computed:
        notes.append("computed")
    if not one.effect:
        notes.append("no effect")
    return f"{one.description} ({', '.join(notes)})"


def _to_int(value: Any) -> int | None:
    if isinstance(value, str) and re.fullmatch(r"\s*[+-]?[0-9]{1,18}\s*", value):
        return int(value)
    whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    return int(value) if whole and not isinstance(value, bool) and abs(value) < 2**63 else None


def _to_float(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _to_bool(value: Any) -> bool | None:
    return value if isinstance(value, bool) else {"true": True, "false": False}.get(str(value).lower())


def _to_text(value: Any) -> str | None:
    if isinstance(value, list) and all(isinstance(one, str) for one in value):
        return " ".join(value)  # DLBS allows long texts in parts
    return str(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else None


def _to_variable(value: Any) -> str | None:
    return json.dumps(value) if isinstance(value, bool) else _to_text(value)


def _to_json(value: Any) -> dict[str, Any] | None:
    if isinstance(value, str):
        try:
            value = json.loads(value or "{}")
        except ValueError:
            return None
    return value if isinstance(value, dict) else None


_CONVERSIONS: dict[str, Any] = {
    "int": _to_int,
    "float": _to_float,
    "bool": _to_bool,
    "str": _to_text,
    "json": _to_json,
    "list": lambda value: value if isinstance(value, list) else None,
    "variable": _to_variable,
}
