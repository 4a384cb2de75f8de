"""What a process of a run reports: `reporting` (log lines, progress bar), `trackers` (curves), `measurements` (the
event log), `batch_times` (for `echelon bench run`) and `monitor` (the sizes of all tensors).
"""
