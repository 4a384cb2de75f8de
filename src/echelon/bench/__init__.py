"""Benchmarks: contenders that take turns in one run, on one machine, so that their ratios mean something."""
