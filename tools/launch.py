#!/usr/bin/env python3
"""MXNet's tools/launch.py: starts a job with --launcher NAME. It is `echelon launch` with MXNet's flags."""

import sys

try:
    from echelon.cli.mxnet_launchers import main
except ImportError as error:
    program = sys.argv[0]
    sys.exit(f"{program}: {error}; activate the environment that has Echelon, or run: ITS-PYTHON {program} …")

sys.exit(main())
