"""Checkpoints. Read `format` (the file), `names` (which file is which), `saver` (what a run saves and resumes from)."""
