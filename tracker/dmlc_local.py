#!/usr/bin/env python3
"""MXNet's tracker/dmlc_local.py: starts a job on this machine. It is `echelon launch` with MXNet's flags."""

import os
import sys

if os.path.isfile("echelon/__init__.py"):  # a working directory with its own copy, which workers import, too
    sys.path.insert(0, os.getcwd())
try:
    from echelon.cli.mxnet_launchers import main
except ImportError as error:
    program = sys.argv[0]
    sys.exit(f"{program}: {error}; activate the environment that has Echelon, or run: ITS-PYTHON {program} …")

sys.exit(main())
