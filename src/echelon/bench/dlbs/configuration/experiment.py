"""One experiment of a plan: its expanded parameters with their types, and those that are computed from others. Pure."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import echelon
from echelon.bench.dlbs.configuration.config import DEFAULT, Config
from echelon.bench.dlbs.configuration.expand import Expander, Get, is_constant, references
from echelon.bench.dlbs.configuration.parameters import (
    ENVIRONMENT,
    PARAMETERS,
    check_key,
    convert,
    parameter_of,
    shown,
    without_effect,
)
from echelon.bench.dlbs.configuration.plan import Planned, build_plan
from echelon.bench.dlbs.configuration.source import Setting
from echelon.errors import UsageError
from echelon.schemes.stores import STORES, SYNONYMS

_NOT_IN_ID = ("exp.id", "exp.log_file", "exp.rerun", "exp.status", "mxnet.rank", "mxnet.scheduler", "monitor.")
_BENCH_ROOT = "BENCH_ROOT"  # DLBS's scripts set this variable to the folder of the configuration
_FACTS = (  # they follow from other parameters, whatever a configuration says
    *("exp.num_local_gpus", "exp.num_gpus", "exp.num_local_replicas", "exp.num_replicas"),
    *("exp.device_type", "exp.data"),
)
_STORE = "mxnet.kv_store"
_BATCH, _EFFECTIVE = "exp.replica_batch", "exp.effective_batch"


@dataclass(frozen=True)
class Experiment:
    """`varied`: what distinguishes it from others of its plan. `where`: where each parameter was written."""

    parameters: Mapping[str, Any]
    varied: Mapping[str, Any]
    where: Mapping[str, str]

    @property
    def log_file(self) -> Path:
        """Where its log goes."""
        return Path(self.parameters["exp.log_file"])

    @property
    def title(self) -> str:
        """What distinguishes it, for a line or a message."""
        return ", ".join(f"{key}={shown(value)}" for key, value in self.varied.items()) or self.parameters["exp.model"]

    @property
    def num_workers(self) -> int:
        """The workers of all machines."""
        return int(self.parameters["exp.num_nodes"] * self.parameters["echelon.num_workers"])

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables that the parameters set for all processes."""
        words = (self.parameters.get("mxnet.env") or "").split()
        pairs = [word.partition("=") for word in words]
        if bad := [name for name, equals, _ in pairs if not equals or not name]:
            raise UsageError(f"{self.where['mxnet.env']}: mxnet.env: {bad[0]!r} is not NAME=VALUE")
        own = {key: value for key, value in self.parameters.items() if key.startswith(ENVIRONMENT)}
        return {name: value for name, _, value in pairs} | {
            key.removeprefix(ENVIRONMENT): value for key, value in own.items()
        }


def build_experiments(config: Config, environment: Callable[[str], str | None]) -> list[Experiment]:
    """Return all experiments of a configuration. Raises UsageError for the first one that is invalid."""
    plan = build_plan(config)
    referenced = _referenced(plan)
    for planned in plan:
        for key, setting in planned.settings.items():
            check_key(key, setting.where, referenced=key in referenced or key in config.own)
    experiments = [_expand(config, planned, environment) for planned in plan]
    check_log_files(experiments)
    _check_repeated(plan, experiments)
    return experiments


def notes(config: Config) -> list[str]:
    """Return what to say about a configuration: which of its keys have no effect."""
    referenced = _referenced(build_plan(config))
    unused = [key for key in without_effect(config.given) if key not in referenced]
    return [f"no effect: {', '.join(unused)}"] if unused else []


def _referenced(plan: Sequence[Planned]) -> set[str]:
    return {name for one in plan for setting in one.settings.values() for name in references(setting.value)}


def _expand(config: Config, planned: Planned, environment: Callable[[str], str | None]) -> Experiment:
    claimed = {key: one for key, one in planned.settings.items() if key in _FACTS}
    settings = {key: one for key, one in planned.settings.items() if key not in _FACTS and not _is_unset(key, one)}
    computed = dict(_COMPUTED)
    computed["exp.id"] = lambda get: _digest(planned.settings)
    if _EFFECTIVE in settings and settings.get(_BATCH, Setting(0, DEFAULT)).where == DEFAULT:
        settings.pop(_BATCH, None)
        computed[_BATCH] = lambda get: _replica_batch(get, settings[_EFFECTIVE].where)

    def find_variable(name: str) -> str | None:
        found = environment(name)
        return str(config.folder) if found is None and name == _BENCH_ROOT else found

    def typed(key: str, value: Any, where: str) -> Any:
        parameter = parameter_of(key, config.own)
        return value if parameter is None else convert(key, value, where, parameter)

    expander = Expander(settings, computed, find_variable, typed)
    keys = [*settings, *(key for key in computed if key not in settings)]
    parameters = {key: value for key in keys if (value := expander.get(key)) is not None}
    for key in _only_for_other_stores(parameters.get(_STORE), planned.varied):
        parameters.pop(key, None)
    where = {key: setting.where for key, setting in settings.items()}
    _check_batches(parameters, where)
    _check_claims(claimed, parameters)
    varied = {key: parameters.get(key, value) for key, value in planned.varied.items()}
    return Experiment(parameters, varied, where)


def _only_for_other_stores(store: str | None, varied: Mapping[str, Any]) -> list[str]:
    """Return the settings that this store does not take, but others of the same sweep may. They have no effect here."""
    known = SYNONYMS.get(str(store).lower(), str(store).lower())
    if _STORE not in varied or known not in STORES:
        return []
    kind = STORES[known]
    taken = {"echelon.staleness": kind.takes_staleness, "echelon.groups": kind.takes_groups}
    return [key for key, takes in taken.items() if not takes and key not in varied]


def _is_unset(key: str, setting: Setting) -> bool:
    """Return whether a parameter that would be computed is given as null."""
    return setting.value is None and key in PARAMETERS and PARAMETERS[key].computed


def _check_claims(claimed: Mapping[str, Setting], parameters: Mapping[str, Any]) -> None:
    """Raise UsageError if a given number of replicas or the like is not what other parameters make it."""
    for key, (value, where) in claimed.items():
        if value is not None and is_constant(value) and convert(key, value, where, PARAMETERS[key]) != parameters[key]:
            raise UsageError(
                f"{where}: {key} is {shown(value)}, but exp.gpus, exp.num_nodes, echelon.num_workers and exp.data_dir "
                f"make it {shown(parameters[key])}; remove it"
            )


def _replica_batch(get: Get, where: str) -> int:
    batch, replicas = get(_EFFECTIVE), get("exp.num_replicas")
    if batch % replicas:
        lower = batch - batch % replicas
        use = f"{lower} or {lower + replicas}" if lower else str(replicas)
        raise UsageError(f"{where}: {_EFFECTIVE} {batch} cannot be divided among {replicas} replicas; use {use}")
    return int(batch // replicas)


def _check_batches(parameters: Mapping[str, Any], where: Mapping[str, str]) -> None:
    expected = parameters[_BATCH] * parameters["exp.num_replicas"] if _BATCH in parameters else None
    if _EFFECTIVE in where and expected is not None and parameters[_EFFECTIVE] != expected:
        raise UsageError(
            f"{where[_EFFECTIVE]}: {_EFFECTIVE} is {parameters[_EFFECTIVE]}, but {_BATCH} {parameters[_BATCH]} "
            f"({where.get(_BATCH, DEFAULT)}) of {parameters['exp.num_replicas']} replicas gives {expected}; give only "
            "one of them"
        )


def _check_repeated(plan: Sequence[Planned], experiments: Sequence[Experiment]) -> None:
    """Raise UsageError if values that were written differently, such as 4 and 4.0, give the same experiment twice."""
    seen: dict[str, Planned] = {}
    for planned, one in zip(plan, experiments, strict=True):
        if one.parameters["exp.status"] == "disabled":
            continue
        named = [key for key in ("exp.id", "exp.log_file") if key not in planned.varied]
        same = json.dumps({key: value for key, value in one.parameters.items() if key not in named}, sort_keys=True)
        earlier = seen.setdefault(same, planned)
        if earlier is not planned:
            raise _repeated(earlier, planned)


def _repeated(earlier: Planned, planned: Planned) -> UsageError:
    differing = [
        {
            key: value
            for key, value in one.varied.items()
            if key not in other.varied or _differ(value, other.varied[key])
        }
        for one, other in ((earlier, planned), (planned, earlier))
    ]
    first, second = (", ".join(f"{key}={shown(value)}" for key, value in one.items()) for one in differing)
    places = [
        one.settings[key].where for one, keys in ((planned, differing[1]), (earlier, differing[0])) for key in keys
    ]
    names = f"{first or 'the parameters without it'} and {second or 'the parameters without it'}"
    return UsageError(f"{places[0]}: {names} give the same experiment; remove one of them")


def _differ(one: Any, other: Any) -> bool:
    return json.dumps(one) != json.dumps(other)


def check_log_files(experiments: Sequence[Experiment]) -> None:
    """Raise UsageError if two experiments would write the same log, so that one result would be lost."""
    seen: dict[str, Experiment] = {}
    for one in experiments:
        if one.parameters["exp.status"] == "disabled":
            continue
        path = str(one.log_file)
        if path in seen:
            raise UsageError(
                f"{one.where.get('exp.log_file', DEFAULT)}: exp.log_file is {path} for two experiments, "
                f"{seen[path].title} and {one.title}: use what differs in its name, as in logs/${{exp.id}}.log"
            )
        seen[path] = one


def _digest(settings: Mapping[str, Setting]) -> str:
    """Return a digest of the parameters that were given, so that a repeated command finds its logs again."""
    given = {key: one.value for key, one in settings.items() if one.where != DEFAULT and not key.startswith(_NOT_IN_ID)}
    return hashlib.sha256(json.dumps(given, sort_keys=True).encode()).hexdigest()[:12]


def _num_gpus(get: Get) -> int:
    return len((get("exp.gpus") or "").split(",")) if get("exp.gpus") else 0


def _log_file(get: Get) -> str:
    words = [get("exp.model") or "model", get("mxnet.kv_store") or "store", str(get(_EFFECTIVE)), get("exp.id")]
    if get("exp.num_nodes") > 1:
        words.append(f"rank_{get('mxnet.rank')}")
    return f"logs/{re.sub(r'[^A-Za-z0-9_.+-]', '-', '_'.join(words))}.log"


def _needed(get: Get, key: str) -> Any:
    value = get(key)
    if value is None:
        raise UsageError(f"{key} has no value: with --discard-default-config, give all parameters that a run needs")
    return value


_COMPUTED: dict[str, Callable[[Get], Any]] = {
    "exp.num_local_gpus": _num_gpus,
    "exp.num_gpus": lambda get: get("exp.num_local_gpus") * _needed(get, "exp.num_nodes"),
    "exp.device_type": lambda get: "gpu" if get("exp.gpus") else "cpu",
    "exp.num_local_replicas": lambda get: max(1, _num_gpus(get)) * _needed(get, "echelon.num_workers"),
    "exp.num_replicas": lambda get: get("exp.num_local_replicas") * _needed(get, "exp.num_nodes"),
    "exp.effective_batch": lambda get: _needed(get, _BATCH) * get("exp.num_replicas"),
    "exp.data": lambda get: "real" if get("exp.data_dir") or get("mxnet.data_dir") else "synthetic",
    "exp.model_title": lambda get: _needed(get, "exp.model"),
    "exp.framework_ver": lambda get: echelon.__version__,
    "exp.log_file": _log_file,
}
