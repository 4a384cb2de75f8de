"""A worker of MXNet's dist_sync: pushes and pulls a few keys per step and prints the number of the step.

With DMLC_ROLE=scheduler or server, `import mxnet` serves the job and never returns.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import mxnet as mx

NUM_STEPS, STEP_S = int(sys.argv[1]), float(sys.argv[2])

store: Any = mx.kv.create("dist_sync")
weights = [mx.nd.zeros((1000,)) for _ in range(8)]  # so that every server stores some
store.init(list(range(8)), weights)
if store.rank == 0:
    store.set_optimizer(mx.optimizer.SGD(learning_rate=0.1))
store._barrier()
for step in range(NUM_STEPS):
    time.sleep(STEP_S)  # stands for forward and backward
    for key, weight in enumerate(weights):
        store.push(key, mx.nd.ones((1000,)))
        store.pull(key, weight)
    for weight in weights:
        weight.wait_to_read()
    print(f"worker {store.rank} step {step + 1}", flush=True)
