"""The Trainer: five changed lines turn a plain PyTorch loop into a distributed one.

Read `base` (what all kinds share), then the kind that fits the store: `server` (parameter servers), `collective` (a
process group), `multi_device` (a worker with several devices in front of servers).
"""
