"""The training loop of the scripts. Read `fit` (puts a run together), then `run` (epochs, steps, evaluations, the end).

`inputs` opens the data, `evaluate` measures on validation data, `stopping` handles signals, `reporting` writes log
lines, curves and the progress bar, `monitor` has the sizes of all tensors. On a GPU, `compile_beside` and
`compile_child` compile the step while captured steps train, and `memory` says which batch size fits.
"""
