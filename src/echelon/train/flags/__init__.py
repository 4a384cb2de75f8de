"""The command line of training. Read `arguments` (the flags, and the `TrainOptions` they become), then `check`."""
