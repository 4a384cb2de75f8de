"""The figures of one GPU in `docs/results.md`: `make bench-gpu`, or `python -m benchmarks.gpu --help`.

Read `rows` (the commands and their targets) and `published` (the figures to compare with), then `__main__`, `run` (rows
as processes), `log` (a trainer's log as numbers), `results` (records in JSON files) and `tables` (Markdown).
"""
