"""Fixtures of all tests. Those of `leaks` are autouse: a test that leaves something behind fails."""

from leaks import leaves_nothing, marked_session

__all__ = ["leaves_nothing", "marked_session"]
