"""The settings of a run and the arithmetic that follows from them. No processes, no devices, no stores.

Read `options` (all settings of a run), `plan` (shares of the data, batches, resuming), `schedules` (learning rates),
`optimizers` (MXNet's names as torch optimizers), `pace` (artificially slow workers).
"""
