"""What happened: an event log that never blocks a step, and those who read it (summary, progress, stall reports)."""
