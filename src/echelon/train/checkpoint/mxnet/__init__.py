"""Trained models of MXNet. Read `params` (the file of arrays), `model` (from a file to a checkpoint), then how a model
finds its arrays: `names` (by the names of MXNet's scripts), or `symbol` and `graph` (by the symbol file).
"""
