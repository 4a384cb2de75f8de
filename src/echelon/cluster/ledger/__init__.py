"""Who trains which samples. Pure.

`ledger` is the state machine of one store, `rounds` decides how many samples a lease has, `intervals` are sets of
positions, and `recovery` rebuilds a ledger after the scheduler was started again.
"""
