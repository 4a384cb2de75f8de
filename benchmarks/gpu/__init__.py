"""The figures of one GPU that `docs/results.md` shows: `make bench-gpu`, or `python -m benchmarks.gpu --help`."""
