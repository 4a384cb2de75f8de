"""A server: receives, asks the scheme, acts. `shard` has the state and the decisions' execution, `serve` the loop."""
