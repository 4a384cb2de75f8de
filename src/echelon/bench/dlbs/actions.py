"""The actions of the harness: run, build, validate, print-config, help and sysinfo."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from echelon.atomic_file import write_json
from echelon.bench.dlbs.configuration.config import Config, load_config, single_config
from echelon.bench.dlbs.configuration.experiment import Experiment, build_experiments, check_log_files, notes
from echelon.bench.dlbs.configuration.parameters import PARAMETERS, described, shown
from echelon.bench.dlbs.configuration.source import Setting, read_file
from echelon.bench.dlbs.records import benchmark_data
from echelon.environment import variable
from echelon.errors import EchelonError, UsageError

_WIDTH_OF_FILES = 160


def run(args: argparse.Namespace) -> int:
    """Run an action; returns the exit status."""
    return _ACTIONS[args.action](args)


def _run(args: argparse.Namespace) -> int:
    experiments = _experiments(args)
    from echelon.bench.dlbs.sweep import Sweep  # after the plan is built, because these imports take time
    from echelon.bench.dlbs.table import cause_lines, make_table
    from echelon.report.terminal.display import stdout_console

    if not args.no_validation:
        _check_all(experiments)
    sweep = Sweep(experiments, args.progress_file, verbose=args.log_level == "debug")
    status = sweep.run()
    console = stdout_console()
    if not console.is_terminal:
        console.width = _WIDTH_OF_FILES
    console.print(make_table(sweep.outcomes))
    for line in cause_lines(sweep.outcomes):
        print(line)
    if args.json is not None:
        _write(args.json, benchmark_data(one.as_record() for one in sweep.outcomes))
    return status


def _build(args: argparse.Namespace) -> int:
    experiments = _experiments(args)
    plan = [dict(one.parameters) for one in experiments]
    if args.plan is None:
        print(json.dumps(plan, indent=2))
    else:
        _write(args.plan, plan)
        print(f"{_count(len(plan))} written to {args.plan}; echelon bench run --plan {args.plan} runs them")
    return 0


def _validate(args: argparse.Namespace) -> int:
    from echelon.bench.dlbs.command import checked_run

    experiments = _experiments(args)
    failures = 0
    for experiment in experiments:
        try:
            checked_run(experiment)
        except EchelonError as error:
            failures += 1
            print(f"echelon: {error}", file=sys.stderr)
    total = _count(len(experiments))
    print(f"{total}, {failures} of them cannot run" if failures else f"{total}, all valid")
    return 2 if failures else 0


def _count(number: int) -> str:
    return "1 experiment" if number == 1 else f"{number} experiments"


def _print_config(args: argparse.Namespace) -> int:
    config = _config(args)
    body = {
        "parameters": {key: one.value for key, one in config.parameters.items()},
        "variables": {key: one.value for key, one in config.variables.items()},
        "extensions": [
            {
                "condition": dict(one.condition),
                "parameters": {key: setting.value for key, setting in one.parameters.items()},
                "cases": [{key: setting.value for key, setting in case.items()} for case in one.cases],
            }
            for one in config.extensions
        ],
    }
    print(json.dumps(body, indent=2))
    return 0


def _help(args: argparse.Namespace) -> int:
    lines = described(args.words)
    if not lines:
        raise UsageError(f"no parameter matches {' '.join(args.words)}; 'echelon bench help' lists all")
    print("\n".join(lines))
    return 0


def _sysinfo(args: argparse.Namespace) -> int:
    from echelon.bench.dlbs.system_info import SOURCES, check_sources, system_info

    sources = check_sources(args.sources, "--sources") if args.sources else SOURCES
    print(json.dumps(system_info(sources), indent=2))
    return 0


def _config(args: argparse.Namespace) -> Config:
    return load_config(
        args.config, args.parameters, args.variables, args.extensions, with_defaults=not args.discard_default_config
    )


def _experiments(args: argparse.Namespace) -> list[Experiment]:
    if args.action == "run" and args.plan is not None:
        if args.config or args.parameters or args.variables or args.extensions:
            raise UsageError("run --plan runs the experiments of the file as they are: omit --config, -P, -V and -E")
        return _planned(args.plan)
    if args.action == "run" and not (args.config or args.parameters or args.variables or args.extensions):
        raise UsageError("""nothing to run: give --config FILE, or parameters such as -P 'exp.model="lenet"'""")
    config = _config(args)
    experiments = build_experiments(config, variable)
    if args.log_level in ("info", "debug"):
        for note in notes(config):
            print(f"echelon: {args.config or 'parameters'}: {note}", file=sys.stderr, flush=True)
    return experiments


def _planned(path: Path) -> list[Experiment]:
    """Return the experiments of a file that `build --plan` wrote."""
    document = read_file(path)
    if not isinstance(document.value, list) or not all(isinstance(one, dict) for one in document.value):
        raise UsageError(f"{path}: a plan is a list of experiments, as 'echelon bench build --plan {path}' writes it")
    if not document.value:
        raise UsageError(f"{path}: the plan has no experiments")
    plan = document.value
    for index, one in enumerate(plan):
        if "exp.log_file" not in one:
            raise UsageError(f"{document.where(index)}: the experiment has no exp.log_file; write the plan by 'build'")
    found = [key for key in plan[0] if len({shown(one.get(key)) for one in plan}) > 1]
    varied = [key for key in found if key in PARAMETERS and not PARAMETERS[key].computed]
    experiments = []
    for index, one in enumerate(plan):
        settings = {key: Setting(value, document.where(index, key)) for key, value in one.items()}
        (experiment,) = build_experiments(single_config(settings), variable)
        experiments.append(replace(experiment, varied={key: one.get(key) for key in varied}))
    check_log_files(experiments)
    return experiments


def _check_all(experiments: Sequence[Experiment]) -> None:
    """Raise the error of the first experiment if none can run. Otherwise those that cannot are failed cells."""
    from echelon.bench.dlbs.command import checked_run

    errors: list[EchelonError] = []
    for experiment in experiments:
        try:
            if experiment.parameters["exp.status"] != "disabled":
                checked_run(experiment)
            return
        except EchelonError as error:
            errors.append(error)
    if errors:
        raise errors[0]


def _write(path: Path, body: Any) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, body)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error


_ACTIONS: dict[str, Callable[[argparse.Namespace], int]] = {
    "run": _run,
    "build": _build,
    "validate": _validate,
    "print-config": _print_config,
    "help": _help,
    "sysinfo": _sysinfo,
}
