"""Settings and fixtures of all tests. Those of `leaks` are autouse: a test that leaves something behind fails."""

import signal
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

from leaks import leaves_nothing, marked_session

__all__ = ["leaves_nothing", "marked_session"]

signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell, and their children, ignore it

# On busy cores an example may be slow; a failing example is printed in a form that can be pasted into a test.
settings.register_profile(
    "echelon", deadline=None, max_examples=50, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("echelon")


@pytest.fixture(autouse=True, scope="session")
def own_settings(marked_session: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let tests have settings of their own, because jobs that no launcher started write the user's credentials."""
    torch.set_num_threads(1)  # fixtures of a module run before `one_thread`
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
        yield


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Start with one thread, which is faster on two cores that also run servers and workers.

    Training and `echelon score` choose the number for their process, which here is the process of the next test, too.
    """
    torch.set_num_threads(1)
