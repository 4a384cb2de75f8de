"""iperf3 as a contender: the seconds that it takes to move the bytes of a step between two hosts."""

from __future__ import annotations

import json
import subprocess

from echelon.bench.harness.remote import Hosts
from echelon.bench.harness.turns import Contender
from echelon.errors import JobError

PORT = 5201
SECONDS = 2


class Iperf3(Contender):
    """Sends in both directions at once between the first two hosts."""

    def __init__(self, hosts: Hosts, num_bytes: int) -> None:
        super().__init__("iperf3")
        self._hosts, self._num_bytes = hosts, num_bytes
        self._server: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Start the server on the first host, and wait until it listens."""
        self._server = self._hosts.run(self._hosts.names[0], ["iperf3", "-s", "-p", str(PORT), "--forceflush"])
        assert self._server.stdout is not None
        while line := self._server.stdout.readline():
            if "listening" in line:
                return
        raise JobError(f"iperf3 does not start on {self._hosts.names[0]}; is it installed there?")

    def run_round(self, num_steps: int) -> list[float]:
        """Measure for a few seconds. All steps of a round have the same time."""
        to = self._hosts.names[0]
        client = self._hosts.run(
            self._hosts.names[1], ["iperf3", "-c", to, "-p", str(PORT), "-J", "--bidir", "-t", str(SECONDS)]
        )
        report = json.loads(client.communicate(timeout=60)[0])
        if "error" in report:
            raise JobError(f"iperf3 from {self._hosts.names[1]} to {to}: {report['error']}")
        end = report["end"]
        rate = (end["sum_received"]["bits_per_second"] + end["sum_received_bidir_reverse"]["bits_per_second"]) / 8
        return [self._num_bytes / rate] * num_steps

    def stop(self) -> None:
        """End the server."""
        if self._server is not None:
            self._server.kill()
            self._server.communicate()
            self._server = None
