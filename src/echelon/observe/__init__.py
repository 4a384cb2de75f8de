"""The event log of a run (`events`): writing never blocks a training step.

To add an event, call `events.write("kind", …)` where it happens: a worker has `kvstore.events`, servers and the
scheduler have a log of their own. `report/state.py` (`RunState.take`) reads the events that the display and the
summary show.
"""
