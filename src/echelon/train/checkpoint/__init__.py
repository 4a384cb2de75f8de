"""Checkpoints.

Read `format` (the file), `names` (which file is which), `compatibility` (which runs may resume from it), `saver` (what
a run saves and resumes from). `mxnet` reads and writes trained models of MXNet.
"""
