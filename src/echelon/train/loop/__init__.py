"""The training loop of the scripts. Read `fit` (puts a run together), then `run` (epochs, steps, evaluations, the end).

`feeds` has the batches, `evaluation` measures on validation data, `reports` writes log lines, curves and the progress
bar, `stopping` handles signals. On a GPU, `compile_beside` and `compile_child` compile the step while captured steps
train, and `memory` says which batch size fits.
"""
