"""What the events of a run say.

Read `worker` (one worker), `run` (all of a run) and `time_curve` (a curve with a limited number of points).
"""
