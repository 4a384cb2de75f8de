"""Fuzzers: random messages, well-formed and damaged, for servers and the scheduler.

`messages` makes them from a seed.
"""
