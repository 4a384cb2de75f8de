"""`python -m echelon.scheduler`: the scheduler of the job that the environment describes."""

import sys
import traceback

from echelon.environment import Job
from echelon.errors import CRASHED, EchelonError
from echelon.scheduler import serve

if __name__ == "__main__":
    try:
        sys.exit(serve(Job.from_environment()))
    except EchelonError as error:
        print(f"echelon: {error}", file=sys.stderr)
        sys.exit(2)
    except Exception:
        traceback.print_exc()
        sys.exit(CRASHED)
