"""What a shard stores, and the arithmetic on it.

`memory`          where the tensors of a request are; `factored` for gradients that arrive as two factors
`lanes`           keys that are pushed together
`rows`, `tables`  tables of embeddings, which are stored and updated by rows
`optimization`    which kernel updates which keys, and the tasks of an update
`execute`         carries the tasks out: sum, update, copy; `finite` notices NaN
`states`          the optimizer states as they travel
"""
