"""Batches. Read `order` and `sharding` (which samples), `sources`, `loader`, then `memory` and `device`."""
