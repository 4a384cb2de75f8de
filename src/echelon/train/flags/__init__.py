"""The command line of training. Read `arguments` (the flags, and the `TrainOptions` they become), then `check`.

To add a flag, add a line to `arguments`, a field of the same name to `TrainOptions` (recipe/options.py), and its check
to `check`.
"""
