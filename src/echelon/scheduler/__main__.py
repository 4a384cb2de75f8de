"""`python -m echelon.scheduler`: serve the job that the environment describes."""

import sys

from echelon.environment import Job
from echelon.scheduler.serve import serve

sys.exit(serve(Job.from_environment()))
