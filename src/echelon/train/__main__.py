"""`python -m echelon.train JSON`: one worker of a run that `echelon train` started. JSON holds the TrainOptions."""

import sys
from typing import TYPE_CHECKING

from echelon.environment import Job
from echelon.errors import UsageError
from echelon.system import exit_on_interrupt
from echelon.train.script import run_process

if TYPE_CHECKING:
    from echelon.train.recipe.options import TrainOptions


def main(arguments: list[str]) -> int:
    """Train as one worker, or start one process per device; returns the exit status."""
    with exit_on_interrupt():
        options, job = _options(arguments), Job.from_environment()
        if len(options.devices) > 1 and job.num_devices == 1:
            from echelon.launch.devices import run_devices

            return run_devices([sys.executable, "-m", "echelon.train", *arguments], len(options.devices))
        from echelon.train.loop.fit import fit  # imports torch, which takes seconds
    return fit(options, job.run_dir, owns_process=True)


def _options(arguments: list[str]) -> "TrainOptions":
    import msgspec

    from echelon.train.recipe.options import TrainOptions

    try:
        (text,) = arguments
        return msgspec.json.decode(text, type=TrainOptions)
    except (ValueError, msgspec.MsgspecError):
        raise UsageError(
            "'python -m echelon.train' is one worker of a run, which 'echelon train' starts with its options as JSON; "
            "to train, run: echelon train --help"
        ) from None


if __name__ == "__main__":
    run_process(lambda: main(sys.argv[1:]))
