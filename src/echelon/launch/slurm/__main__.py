"""What a batch job of Slurm runs: `python -m echelon.launch.slurm` is the launcher in its allocation."""

from __future__ import annotations

import os
import sys

from echelon.environment import SLURM_REQUEST, take_variable
from echelon.errors import EchelonError, UsageError
from echelon.launch.slurm.launcher import SlurmLauncher
from echelon.launch.slurm.script import from_text


def main() -> int:
    """Run the job of a request in this allocation."""
    text = take_variable(SLURM_REQUEST)
    try:
        if text is None:
            raise UsageError(f"{SLURM_REQUEST} is not set: 'echelon launch --launcher slurm' submits this program")
        request, folder = from_text(text)
        os.chdir(folder)
        return SlurmLauncher().run_batch(request)
    except (EchelonError, OSError) as error:
        print(f"echelon: error: {error}", file=sys.stderr, flush=True)
        return 2


if __name__ == "__main__":
    sys.exit(main())
