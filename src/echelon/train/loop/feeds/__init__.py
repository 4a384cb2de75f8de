"""Where the loop gets its batches from.

`inputs` opens the data set with its loader. `feeds` reads a fixed share of it, `leased` reads the leases of a ledger,
and `choose` chooses between them.
"""
