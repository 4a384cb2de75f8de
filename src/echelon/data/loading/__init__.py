"""Loaders: from samples to batches.

Read `order` (which samples come when), `sources` (where they are read from), `loader` with `buffers`, `decode_pool` and
`decode_process` (images are decoded while they are used), `memory` (small sets are kept decoded), then `device`
(batches on a GPU). `train/loop/feeds/inputs.py` chooses the loader of a run.
"""
