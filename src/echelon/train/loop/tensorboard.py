"""Scalar curves for TensorBoard (`--tensorboard DIR`). The package is optional and imported only if used."""

from __future__ import annotations

from typing import Any

from echelon.errors import UsageError


class ScalarWriter:
    """Writes scalar curves to a TensorBoard event file; does nothing if no directory was given. Use `open`."""

    def __init__(self, writer: Any = None) -> None:
        self._writer = writer

    @classmethod
    def open(cls, directory: str | None) -> ScalarWriter:
        """Return a writer to `directory`, which is created if necessary; None or "" returns one that writes nothing."""
        if not directory:
            return cls()
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UsageError(
                f"--tensorboard {directory} needs a package that is not installed ({error}); "
                "pip install 'echelon[tensorboard]'"
            ) from error
        try:
            return cls(SummaryWriter(directory))
        except OSError as error:
            raise UsageError(f"--tensorboard {directory}: {error.strerror}; give a writable directory") from error

    def write(self, name: str, value: float, step: int) -> None:
        """Add one point to one curve."""
        if self._writer is not None:
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush the file and stop the writer's thread. Later points are dropped."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
