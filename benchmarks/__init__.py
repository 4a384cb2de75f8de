"""Benchmarks that only this repository needs, and the raw results of all benchmarks."""
