"""What a terminal shows of a run: live (`display`, `screen`, `lines`, `columns`), and at the end (`result`)."""
