"""The reductions of flat buckets: each starts when its gradients are complete, in the same order on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from echelon.kvstore.collective.process_group import Reduction
from echelon.train.trainer.servers.sparse_rows import as_dense
from echelon.train.trainer.workers.flat_buckets import FlatBucket

_ABSENT = -1  # the version of a gradient that does not exist


class BucketReductions:
    """The reductions of all buckets. Gradients are multiplied by the samples of the batch before they are summed."""

    def __init__(self, buckets: Sequence[FlatBucket], reduce: Callable[[Tensor], Reduction]) -> None:
        self._buckets = buckets
        self._reduce = reduce
        self._bucket_of = {name: bucket for bucket in buckets for name in bucket.parameters}
        self._pending: list[Reduction] = []  # in the order of the buckets
        self._versions: dict[str, int] = {}  # of the gradients that were sent
        self._densified: set[str] = set()  # parameters of which it was logged
        self.given: set[str] = set()  # parameters whose gradients were sent

    @property
    def num_started(self) -> int:
        """The number of buckets that are being reduced."""
        return len(self._pending)

    def has_arrived(self, name: str) -> bool:
        """Return whether backward has finished a gradient since the last reduction."""
        return name in self._bucket_of[name].arrived

    def was_sent(self, name: str) -> bool:
        """Return whether the bucket of a gradient is being reduced."""
        return name in self._versions

    def arrive(self, name: str, samples: int) -> None:
        """Note that backward has finished a gradient. Start to reduce the buckets that are complete and next."""
        self._bucket_of[name].arrived.add(name)
        while self.num_started < len(self._buckets) and self._buckets[self.num_started].is_complete:
            self._start_next(samples)

    def discard(self, name: str) -> None:
        """Note that a gradient was cleared. If it was sent, this is not a change."""
        if name in self._versions:
            self._versions[name] = _ABSENT
        else:
            self._bucket_of[name].arrived.discard(name)

    def start_rest(self, samples: int) -> None:
        """Start to reduce the buckets that are not complete. Missing gradients count as zero."""
        while self.num_started < len(self._buckets):
            self._start_next(samples)

    def changed(self) -> str | None:
        """Return the name of a gradient that was changed after it was sent, if there is one."""
        for name, version in self._versions.items():
            if _version(self._bucket_of[name].parameters[name].grad) != version:
                return name
        return None

    def results(self) -> list[Tensor]:
        """Wait for all sums."""
        return [reduction.result() for reduction in self._pending]

    def clear(self) -> None:
        """Begin again."""
        self._pending.clear()
        self._versions.clear()
        self.given = set()
        for bucket in self._buckets:
            bucket.arrived.clear()

    def _start_next(self, samples: int) -> None:
        bucket = self._buckets[self.num_started]
        for name, parameter in bucket.parameters.items():
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = as_dense(name, parameter.grad, self._densified)
            gradient = parameter.grad
            self._versions[name] = _version(gradient)
            if gradient is not None and samples:
                self.given.add(name)
        bucket.collect(self.given)
        bucket.gradients.mul_(samples)
        self._pending.append(self._reduce(bucket.gradients))


def _version(gradient: Tensor | None) -> int:
    """Return torch's version counter, which grows with every write."""
    return _ABSENT if gradient is None else gradient._version
