"""`python -m echelon.train JSON`: one worker of a run that `echelon train` started. JSON holds the TrainOptions."""

import sys

import msgspec

from echelon.environment import Job
from echelon.errors import EchelonError
from echelon.launch.devices import run_devices
from echelon.train.loop.fit import fit
from echelon.train.recipe.options import TrainOptions

try:
    options = msgspec.json.decode(sys.argv[1], type=TrainOptions)
    job = Job.from_environment()
    if len(options.devices) > 1 and job.num_devices == 1:
        sys.exit(run_devices([sys.executable, "-m", "echelon.train", sys.argv[1]], len(options.devices)))
    sys.exit(fit(options, job.run_dir))
except EchelonError as error:
    sys.exit(f"error: {error}")
except KeyboardInterrupt:
    sys.exit(130)
