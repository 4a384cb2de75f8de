"""What the benchmarks share. It does not depend on what is measured.

Read `turns` (contenders that take turns, statistics), `protocol` (the lines between harness and worker program),
`process` (a contender made of processes), `job` (which processes), `mxnet_environment` (MXNet's Python), `checks`
(of the flags) and `results` (tables and result files).
"""
