"""One training step: forward pass, backward pass, update and metrics.

Read `eager` (what every step computes, and the step that the host drives), `choose` (which engine runs the steps, and
why), `forward` (what can be compiled), `captured` (a whole step as one CUDA graph), then `captured_with_servers` and
`staging` (the same with the update on servers). `precision`, `losses`, `metrics` and `average` are parts of all steps.
"""
