"""A Ray cluster of two nodes, in a process of its own, so that Ray's threads and handlers stay out of the tests.

Run as a program, it starts the cluster, prints its address and its folder of logs, and obeys the words that it reads:
`kill` ends the second node at once, as a machine that loses power, and `add` starts it again.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any, Self

HEAD_CPUS, SECOND_CPUS = 3, 2  # a bundle with three CPUs is always on the head
OBJECT_STORE_BYTES = 80 << 20
_NOT_THE_TESTS = {"RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}


class RayCluster:
    """The tests' side: starts the cluster, kills and adds its second node, and ends it."""

    def __init__(self, mark: str) -> None:
        """`mark`: a variable of the tests' environment that the processes of Ray do not get."""
        environment = {name: value for name, value in os.environ.items() if name != mark}
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            env=environment | _NOT_THE_TESTS,
        )
        self.address, self.logs = self._read(), self._read()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate(timeout=60)

    def kill_second_node(self) -> None:
        """End the second node without notice."""
        self._order("kill")

    def add_second_node(self) -> None:
        """Start a node in place of the second one."""
        self._order("add")

    def _order(self, word: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word}\n")
        assert self._read() == word

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the Ray cluster ended; its error is above"
        return line.strip()


def main() -> None:
    """Run the cluster."""
    answers = os.dup(1)
    os.dup2(2, 1)  # what Ray prints goes to the tests' log

    def answer(text: str) -> None:
        os.write(answers, f"{text}\n".encode())

    from ray.cluster_utils import Cluster

    common: dict[str, Any] = {"object_store_memory": OBJECT_STORE_BYTES, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": HEAD_CPUS, **common})
    second = cluster.add_node(num_cpus=SECOND_CPUS, **common)
    answer(cluster.address)
    answer(cluster.head_node.get_logs_dir_path())
    for word in sys.stdin:
        if word.strip() == "kill":
            cluster.remove_node(second, allow_graceful=False)
        else:
            second = cluster.add_node(num_cpus=SECOND_CPUS, **common)
        answer(word.strip())
    cluster.shutdown()


if __name__ == "__main__":
    main()
