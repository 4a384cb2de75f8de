"""A launcher over agents on this machine, connected by pipes as ssh connects them."""

from __future__ import annotations

import argparse
import subprocess
import sys
from tempfile import TemporaryFile

from echelon.launch.agents.coordinate import AgentBackend
from echelon.launch.agents.remote import RemoteProcess
from echelon.launch.agents.streams import ProgramStream
from echelon.launch.hosts import Host
from echelon.launch.interface import Output
from echelon.launch.plan import Plan, PlannedProcess, Request, describe, make_plan
from echelon.launch.run import run_job
from echelon.launch.supervision.processes import ChildProcess

HERE = Host("127.0.0.1")


class PipeLauncher:
    """Starts every process through an agent of this machine."""

    name = "pipes"

    def add_arguments(self, group: argparse._ArgumentGroup) -> None:
        pass

    def plan(self, request: Request) -> Plan:
        request = Request(**{**vars(request), "hosts": (HERE,)})
        return make_plan(request, scheduler_host=HERE)

    def describe(self, plan: Plan) -> str:
        return describe(plan)

    def run(self, plan: Plan, output: Output) -> int:
        return run_job(plan, output, AgentBackend(plan, connect))


def connect(planned: PlannedProcess) -> RemoteProcess:
    """Start an agent."""
    errors = TemporaryFile()  # noqa: SIM115  (the stream closes it)
    arguments = [sys.executable, "-m", "echelon.launch.agents.agent"]
    program = ChildProcess(f"agent of {planned.name}", arguments, {}, stdin=subprocess.PIPE, stderr=errors)
    stream = ProgramStream(program, errors, lambda code, text: f"its agent ended with {code}: {text.strip()}")
    return RemoteProcess(planned.name, str(planned.host), stream)
