"""What a run is told, and the arithmetic that follows from it. No processes, no devices, no stores.

Read `options` (one frozen value per run), `plan` (shares of the data, batches, resuming), `schedules` (learning rates),
`optimizers` (MXNet's names as torch optimizers), `pace` (artificially slow workers), `ranges` (the numbers flags take).
"""
