"""Conformance suites: what every transport and every store must do, as functions that anybody's implementation can run.

    from echelon.testing import check_kvstore, check_transport

    check_transport(MyTransport)
    check_kvstore(my_run, "dist_sync", num_workers=3)

A suite raises AssertionError at the first promise that is broken, with both values. Each check is also by itself in
`transport.CHECKS` and `kvstore.CHECKS`, for a test runner that reports one by one.
"""

from echelon.testing.kvstore import check_kvstore
from echelon.testing.transport import check_transport

__all__ = ["check_kvstore", "check_transport"]
