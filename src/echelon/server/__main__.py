"""`python -m echelon.server` runs the server of the job that the environment describes."""

import sys
import traceback

from echelon.environment import Job
from echelon.errors import CRASHED, EchelonError
from echelon.server.serve import serve
from echelon.transport.choose import transport_of

try:
    job = Job.from_environment()
    sys.exit(serve(job, transport_of(job)))
except EchelonError as error:
    print(f"echelon: {error}", file=sys.stderr)
    sys.exit(2)
except Exception:
    traceback.print_exc()
    sys.exit(CRASHED)
