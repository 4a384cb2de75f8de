"""From files and flags to experiments. Pure.

Read `source` (JSON whose errors have a line), `parameters` (the table of keys), `config` (files and flags), `expand`
(`${…}`), `plan` (variables and extensions) and `experiment` (expanded parameters with their types).
"""
