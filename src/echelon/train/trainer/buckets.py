"""Buckets: adjacent parameters that are sent together, in the order in which backward finishes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from echelon.train.trainer.regions import region_of

BUCKET_BYTES = 4 << 20
FIRST_BUCKET_BYTES = 1 << 20  # a small first bucket, so that sending starts soon after backward begins
_GPU_BUCKETS = 8
_SMALLEST_BYTES = 256 << 10


def limit_on_gpu(total_bytes: int) -> int:
    """Return the size of a bucket on a GPU.

    Backward takes milliseconds there, so a small network needs small buckets for any to be sent before it ends.
    """
    return min(BUCKET_BYTES, max(_SMALLEST_BYTES, total_bytes // _GPU_BUCKETS))


def make_buckets(
    sizes_bytes: Sequence[int],
    limit: int = BUCKET_BYTES,
    first: int = FIRST_BUCKET_BYTES,
    parts: Sequence[int] | None = None,
) -> list[list[int]]:
    """Divide parameters (in push order, by index) into buckets of about `limit` bytes.

    A larger parameter is a bucket by itself. `parts` gives the part of the network that each parameter is in. The
    gradients of a part are finished at the same time, so a bucket does not cross parts: the last bucket, which all
    workers wait for, then contains no gradient that could have been sent earlier.
    """
    buckets: list[list[int]] = []
    members: list[int] = []
    filled = 0
    for index, size in enumerate(sizes_bytes):
        room = limit if buckets else min(first, limit)
        begins = parts is not None and index > 0 and parts[index] != parts[index - 1]
        if members and (begins or filled + size > room):
            buckets.append(members)
            members, filled = [], 0
        members.append(index)
        filled += size
    if members:
        buckets.append(members)
    return buckets


def names_by_bucket(model: nn.Module, parameters: Mapping[str, Tensor], optimizer: Optimizer) -> list[list[str]]:
    """Divide parameters, in about the order of backward, into buckets of names for a store on servers.

    Inside a bucket, the parameters of one optimizer group are adjacent, because servers update adjacent keys with equal
    settings in one run. If weights that decay alternated with biases that do not, each would be a run of its own, and a
    step would take several times as long.
    """
    names = list(parameters)
    sizes = [parameter.numel() * parameter.element_size() for parameter in parameters.values()]
    if next(iter(parameters.values())).device.type == "cpu":
        buckets = make_buckets(sizes)
    else:
        parts = region_of(model)
        limit = limit_on_gpu(sum(sizes))
        buckets = make_buckets(sizes, limit, limit, [parts[name] for name in names])
    groups = enumerate(optimizer.param_groups)
    group_of = {id(parameter): index for index, group in groups for parameter in group["params"]}
    return [
        sorted((names[index] for index in bucket), key=lambda name: group_of[id(parameters[name])])
        for bucket in buckets
    ]
