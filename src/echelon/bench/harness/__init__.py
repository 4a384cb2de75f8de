"""Shared by benchmarks: `alternate` (taking turns), `process`, `protocol`, `job`, `results`, `mxnet_environment`."""
