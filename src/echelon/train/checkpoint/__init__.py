"""Checkpoints. Read `format` (the bytes of a file), `names` (which file is which), `saver` (when a run saves)."""
