"""What the events of a run say.

Read `worker` and `server` (one process), `run` (all of a run), `epochs` (its figures by epoch), `resources` (how busy
its devices are), `slowness` (who is slow, and why) and `time_curve` (a curve with a limited number of points).
"""
