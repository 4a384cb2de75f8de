"""The Trainers whose optimizer runs in each worker, on the mean of the gradients.

Read `mean_gradients` (what they share: the mean when backward ends), then `collective` (a process group) with
`flat_buckets`, `bucket_reductions` and `sparse_gather`, `sharded` (each rank has a part of the optimizer's state), and
`local_update` (servers that only average).
"""
