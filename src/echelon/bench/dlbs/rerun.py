"""What an existing log means for an experiment: whether it runs again, and how it is shown if not. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from echelon.bench.dlbs.configuration.parameters import shown

OK, FAILURE, RUNNING, SKIPPED, DISABLED, SIMULATED = "ok", "failure", "running", "skipped", "disabled", "simulated"
_NOT_COMPARED = ("exp.status", "exp.status_msg", "exp.rerun", "exp.log_file", "exp.framework_ver", "monitor.")


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether an experiment runs, and why. `conflict`: its log holds another experiment, which must not be lost."""

    runs: bool
    reason: str
    conflict: bool = False


def decide(parameters: Mapping[str, Any], log: Mapping[str, Any] | None) -> Decision:
    """Decide whether to run an experiment whose log has these records; None: there is no log."""
    if log is None:
        return Decision(True, "there is no log")
    if parameters["exp.rerun"] == "always":
        return Decision(True, "exp.rerun is always")
    if "exp.status" not in log or log["exp.status"] == RUNNING:
        return Decision(True, "the earlier run was interrupted")
    if (difference := first_difference(parameters, log)) is not None:
        return Decision(
            False,
            f"{parameters['exp.log_file']} holds another experiment, with {difference}: give exp.log_file a name that "
            'differs, or set exp.rerun to "always"',
            conflict=True,
        )
    if log["exp.status"] == OK:
        return Decision(False, 'it has a result already; exp.rerun "always" runs it again')
    if parameters["exp.rerun"] == "onfail":
        return Decision(True, "it failed earlier, and exp.rerun is onfail")
    return Decision(False, 'it failed earlier; exp.rerun "onfail" runs it again')


def first_difference(parameters: Mapping[str, Any], log: Mapping[str, Any]) -> str | None:
    """Return a parameter whose value in the log is another one, with both values."""
    for key in parameters:
        if key in log and not key.startswith(_NOT_COMPARED) and log[key] != parameters[key]:
            return f"{key} {shown(log[key])} instead of {shown(parameters[key])}"
    return None
