"""`python -m echelon`: the same as the `echelon` command."""

import sys

from echelon.cli.main import main

sys.exit(main())
