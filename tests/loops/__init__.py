"""Loops that people write, each run as plain PyTorch, with a Trainer, and as PyTorch's DistributedDataParallel.

`loop` says what a loop is, `cases` has the loops by theme, `kinds` the ways to run one, `workers` and `servers` the
processes and threads that do it, `results` compares what came out. `table` writes the outcomes of all loops into
docs/how-to/use-your-own-loop.md.
"""
