"""One training step: forward, backward, update and measurements.

Read `eager` (what every step computes), `choose` (which engine runs it and why), `captured` (a whole step as one CUDA
graph), then `captured_with_servers` and `staging` (the same with the update on servers).
"""
