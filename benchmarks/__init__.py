"""Benchmarks that only this repository needs, and the result files of all benchmarks. Not part of the wheel."""
