#!/usr/bin/env python3
"""MXNet's tools/parse_log.py: the figures of a training log as a table. 'echelon report parse-log' does more."""

import os
import sys

if os.path.isfile("echelon/__init__.py"):  # a working directory with its own copy
    sys.path.insert(0, os.getcwd())
try:
    from echelon.cli.report.parse_log import main_like_mxnet
except ImportError as error:
    program = sys.argv[0]
    sys.exit(f"{program}: {error}; activate the environment that has Echelon, or run: ITS-PYTHON {program} …")

sys.exit(main_like_mxnet())
