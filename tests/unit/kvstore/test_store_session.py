"""A worker that a server refuses, because it was removed, waits for the scheduler to say so."""

from __future__ import annotations

import time
from typing import Any

import pytest

from echelon.errors import JobError
from echelon.kvstore.servers.store_session import REASON_S, StoreSession

TIMEOUT_S = 60.0


class Scene:
    """A session whose time passes only while somebody waits for its changes; it is its own condition variable."""

    def __init__(self, *, back_at: float = 0.0, told_at: float | None = None) -> None:
        self.now = 0.0
        self.timeout_s = TIMEOUT_S
        self._back_at, self._told_at = back_at, told_at

    @property
    def changed(self) -> Scene:
        return self

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def wait(self, seconds: float) -> None:
        self.now += seconds

    @property
    def reconnecting(self) -> str | None:
        return "the scheduler is gone" if self.now < self._back_at else None

    @property
    def failure(self) -> str | None:
        return "no message for 3 s" if self._told_at is not None and self.now >= self._told_at else None

    def check_job(self) -> None:
        if self.failure is not None:
            raise JobError(self.failure)


def waited(monkeypatch: pytest.MonkeyPatch, **times: Any) -> float:
    """Return how long a worker waits for the reason, or raise it."""
    scene = Scene(**times)
    monkeypatch.setattr(time, "monotonic", lambda: scene.now)
    StoreSession(scene, 0).check_removed()  # type: ignore[arg-type]
    return scene.now


def test_a_reason_that_comes_soon_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(JobError, match="no message for 3 s"):
        waited(monkeypatch, told_at=0.75 * REASON_S)


def test_without_a_reason_the_wait_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    assert waited(monkeypatch) == pytest.approx(REASON_S, abs=0.3)


def test_a_scheduler_that_is_started_again_says_it_then(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(JobError, match="no message for 3 s"):
        waited(monkeypatch, back_at=5 * REASON_S, told_at=5.5 * REASON_S)


def test_the_wait_for_a_scheduler_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    assert waited(monkeypatch, back_at=10 * TIMEOUT_S) == pytest.approx(TIMEOUT_S, abs=0.3)
