"""What the charts of recorded runs show. Nothing here draws: `page` makes HTML of it, `plots` makes files.

Read `recorded` (a run, read from its folder), `history` (its values over time, of limited size), `chart` (the kinds of
chart) and `scales` (ticks, units, thinning); then the charts: `learning`, `work`, `steps`, `staleness`.
"""
