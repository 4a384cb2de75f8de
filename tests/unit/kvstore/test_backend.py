"""Which back end moves the values of a process group: NCCL needs a GPU for each member."""

from __future__ import annotations

import pytest

from echelon.kvstore.collective.world import choose_backend


@pytest.mark.parametrize(
    ("gpus", "backend"),
    [
        ([], "gloo"),  # CPUs
        (["a", "b"], "nccl"),
        (["a", "a"], "gloo"),
        (["a", "b", "a"], "gloo"),
    ],
)
def test_members_that_share_a_gpu_use_gloo(gpus: list[str], backend: str) -> None:
    assert choose_backend(gpus) == backend
