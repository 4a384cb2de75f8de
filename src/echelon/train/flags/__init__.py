"""The command line of training.

Read `arguments` (the flags, and the `TrainOptions` they become), `check` (all checks of flags), `no_effect` (warnings
about flags without effect).
"""
