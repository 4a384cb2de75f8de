"""The figures of one GPU in `docs/results.md`: `make bench-gpu`, or `python -m benchmarks.gpu --help`.

Read `rows` (the commands and their targets) and `published` (the figures to compare with), then `__main__`, `run` (rows
as processes), `mps` (processes that share the GPU), `log` (a trainer's log and events as numbers), `results` (records
in JSON files), `tables` and `cluster_tables` (Markdown).
"""
