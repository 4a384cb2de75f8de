"""The published comparison, `make bench`: Echelon beside MXNet, Gloo and DDP, and its schemes beside each other.

Read `rows` (what is measured), then `__main__`, `run` (rows as processes, one after another), `results` (the files that
rows write), `tables`, `schemes_table` and
`one_rate_table` (the blocks of docs/results.md) and `picture` (docs/comparison.png).
"""
