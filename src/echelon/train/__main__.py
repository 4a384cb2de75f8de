"""`python -m echelon.train JSON`: one worker of a run, told what to do by `echelon train`."""

import sys

import msgspec

from echelon.environment import Job
from echelon.errors import EchelonError
from echelon.train.fit import fit
from echelon.train.options import TrainOptions

try:
    fit(msgspec.json.decode(sys.argv[1], type=TrainOptions), Job.from_environment().run_dir)
except EchelonError as error:
    sys.exit(f"error: {error}")
except KeyboardInterrupt:
    sys.exit(130)
