"""Tables of results, in the columns that MXNet's users publish, generated from runs.

Read `record` (one run, as the tables see it), `folders` and `results` (where records come from), `table` (Markdown, CSV
and JSON), then the tables: `published` (epoch times, accuracy by epoch, throughput), `scaled` (weak and strong scaling,
by the formulas of `scaling`) and `target` (time to an accuracy). `choose` lists them.
"""
