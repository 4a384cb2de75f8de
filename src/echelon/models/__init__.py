"""Networks by name, in plain PyTorch: no devices, workers or data. torch is imported when a network is built.

Read `registry` (from a name to a network), `layers` (what families are built from), then any family, for example
`resnet`. To add a network, write a function as there and add its name to the table in `registry`.
"""

from __future__ import annotations

from echelon.models.registry import build, check_options, check_outputs, names

__all__ = ["build", "check_options", "check_outputs", "names"]
