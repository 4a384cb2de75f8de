"""Data sets by name.

Read `datasets` (the table of all sets), `find` and `formats` (their files), `builtin` (sets without files), then
`published` (`echelon data get`).
"""
