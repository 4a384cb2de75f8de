"""The command line of training. Read `arguments` (the flags), then `no_effect` (flags that do nothing in a run)."""
