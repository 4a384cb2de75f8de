"""The plan of a sweep: one experiment per combination of the variables, changed by the extensions that match. Pure.

A condition matches if every parameter that it names and the experiment has does; a missing one counts as a match, as in
DLBS. Texts are regular expressions, from the beginning of the value, and lists are alternatives. The groups of a match
are `${__condition.KEY_1}`, …, and the whole value `${__condition.KEY_0}`.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from echelon.bench.dlbs.configuration.config import Config, Extension
from echelon.bench.dlbs.configuration.expand import is_constant
from echelon.bench.dlbs.configuration.parameters import PARAMETERS, shown
from echelon.bench.dlbs.configuration.source import Setting
from echelon.errors import UsageError, unknown_name

MAX_EXPERIMENTS = 10_000
VAR_ORDER = "sys.plan_builder.var_order"
_MATCHED = re.compile(r"\$\{__condition\.([^${}]+)\}")


@dataclass(frozen=True)
class Planned:
    """An experiment whose parameters are not expanded yet. `varied`: the variables and cases that distinguish it."""

    settings: Mapping[str, Setting]
    varied: Mapping[str, Any]


def build_plan(config: Config) -> list[Planned]:
    """Return the experiments in the order in which they run: the last variable varies fastest."""
    order = _variable_order(config)
    count = math.prod(len(config.variables[key].value) for key in order)
    if count > MAX_EXPERIMENTS:
        sizes = " x ".join(f"{len(config.variables[key].value)} {key}" for key in order)
        raise UsageError(
            f"{config.variables[order[0]].where}: the variables give {count:,} experiments ({sizes}); at most "
            f"{MAX_EXPERIMENTS:,} are allowed"
        )
    plan: list[Planned] = []
    for values in itertools.product(*(config.variables[key].value for key in order)):
        chosen = dict(zip(order, values, strict=True))
        settings = config.parameters | {
            key: Setting(value, config.variables[key].where) for key, value in chosen.items()
        }
        plan += _extend(Planned(settings, chosen), config.extensions)
        if len(plan) > MAX_EXPERIMENTS:
            raise UsageError(f"the cases of the extensions give more than {MAX_EXPERIMENTS:,} experiments")
    return plan


def _variable_order(config: Config) -> list[str]:
    order = config.parameters.get(VAR_ORDER, Setting([], ""))
    if not isinstance(order.value, list) or not all(isinstance(key, str) for key in order.value):
        raise UsageError(f"{order.where}: {VAR_ORDER} is {shown(order.value)}; it must be a list of keys")
    first = list(dict.fromkeys(order.value))
    for key in first:
        if not config.variables:
            raise UsageError(f"{order.where}: {VAR_ORDER} names {key}, but the configuration has no variables")
        if key not in config.variables:
            raise UsageError(f"{order.where}: {VAR_ORDER}: {unknown_name('variable', key, config.variables)}")
    return [*first, *(key for key in config.variables if key not in first)]


def _extend(first: Planned, extensions: tuple[Extension, ...]) -> list[Planned]:
    experiments = [first]
    for extension in extensions:
        experiments = [one for each in experiments for one in _apply(each, extension)]
        if len(experiments) > MAX_EXPERIMENTS:
            raise UsageError(
                f"{extension.where}: the cases of the extensions give more than {MAX_EXPERIMENTS:,} experiments"
            )
    return experiments


def _apply(experiment: Planned, extension: Extension) -> Iterator[Planned]:
    matches = match_condition(experiment.settings, extension)
    if matches is None:
        yield experiment
        return
    changed = {**experiment.settings, **_with_matches(extension.parameters, matches)}
    for case in extension.cases or ({},):
        own = _with_matches(case, matches)
        yield Planned(changed | own, {**experiment.varied, **{key: one.value for key, one in own.items()}})


def match_condition(settings: Mapping[str, Setting], extension: Extension) -> dict[str, Any] | None:
    """Return what the condition of an extension matched, by KEY_N, or None if it does not match."""
    matches: dict[str, Any] = {}
    for key, wanted in extension.condition.items():
        if key not in settings:
            if key in PARAMETERS and PARAMETERS[key].computed:
                raise UsageError(
                    f"{extension.where}: the condition tests {key}, which is computed from other parameters"
                )
            continue
        value = settings[key].value
        if not is_constant(value):
            raise UsageError(
                f"{extension.where}: the condition tests {key}, which is {shown(value)} ({settings[key].where}): only "
                "constants can be tested"
            )
        found = _match(value, wanted)
        if found is None:
            return None
        matches |= {f"{key}_{index}": one for index, one in enumerate(found)}
    return matches


def _match(value: Any, wanted: Any) -> list[Any] | None:
    """Return the value and the groups of the regular expression, or None."""
    if isinstance(wanted, str) and wanted:
        match = re.match(wanted, value if isinstance(value, str) else json.dumps(value))
        return None if match is None else [value, *(group or "" for group in match.groups())]
    alternatives = wanted if isinstance(wanted, list) else [wanted]
    return [value] if json.dumps(value) in map(json.dumps, alternatives) else None


def _with_matches(settings: Mapping[str, Setting], matches: Mapping[str, Any]) -> dict[str, Setting]:
    def replace(value: Any, where: str) -> Any:
        if isinstance(value, list):
            return [replace(one, where) for one in value]
        if not isinstance(value, str):
            return value

        def matched(found: re.Match[str]) -> str:
            if found[1] not in matches:
                have = ", ".join(f"${{__condition.{name}}}" for name in matches) or "nothing"
                raise UsageError(f"{where}: {found[0]} was not matched by the condition, which has matched {have}")
            return str(matches[found[1]])

        return _MATCHED.sub(matched, value)

    return {key: Setting(replace(one.value, one.where), one.where) for key, one in settings.items()}
