"""Checkpoints. Read `format` (the file), `names` (which file is which), `saver` (what a run saves and resumes from).

`compatibility` rejects checkpoints of another run; `random_state` captures torch's random number generators.
"""
