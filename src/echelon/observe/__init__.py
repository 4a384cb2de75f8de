"""The event log of a run (`events`): writing never blocks a training step."""
