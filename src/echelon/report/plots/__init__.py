"""Plots as files, drawn with matplotlib. `colours` has the colour of each store, the same in every plot and page.

`curves` draws `curves.png` of a run, `bands` the median and the spread of repeated runs.
"""
