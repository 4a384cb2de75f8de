"""Conformance suites: functions that check whether a transport, a store or a launcher behaves as Echelon requires.

    from echelon.testing import check_kvstore, check_launcher, check_transport

    check_transport(MyTransport)
    check_kvstore(my_run, "dist_sync", num_workers=3)
    check_launcher(["--launcher", "mine.cluster:Launcher"])

A suite raises AssertionError at the first check that fails, with the actual and the expected value. `transport.CHECKS`,
`kvstore.CHECKS` and `launcher.CHECKS` list the single checks, for a test runner that reports each of them.
"""

from echelon.testing.kvstore import check_kvstore
from echelon.testing.launcher import check_launcher
from echelon.testing.transport import check_transport

__all__ = ["check_kvstore", "check_launcher", "check_transport"]
