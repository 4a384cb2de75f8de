"""Plots as files, drawn with matplotlib.

`curves` draws `curves.png` of a run, `charts` the charts that `echelon report plots` writes, `bands` the median and the
spread of repeated runs.
"""
