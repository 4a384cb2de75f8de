"""The networks, by name. Nothing here knows of devices, workers or data; torch is imported when a network is built."""

from __future__ import annotations

from echelon.models.registry import build, check_options, check_outputs, names

__all__ = ["build", "check_options", "check_outputs", "names"]
