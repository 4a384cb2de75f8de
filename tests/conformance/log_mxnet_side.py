"""Runs under MXNet's Python: a small training whose log lines go to standard error, and MXNet's own parse_log."""

from __future__ import annotations

import json
import logging
import os
import runpy
import sys

import mxnet as mx
import numpy as np


def train(num_epochs: int) -> None:
    """Train with a Module and its Speedometer, as MXNet's image-classification scripts do."""
    logging.basicConfig(level=logging.DEBUG)
    images, labels = np.random.RandomState(1).rand(96, 4).astype("float32"), np.arange(96) % 3
    batches = mx.io.NDArrayIter(images, labels, 8, label_name="softmax_label")
    output = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=3)
    metrics = mx.metric.CompositeEvalMetric([mx.metric.Accuracy(), mx.metric.TopKAccuracy(top_k=2)])
    mx.mod.Module(mx.sym.SoftmaxOutput(output, name="softmax")).fit(
        batches,
        eval_data=batches,
        eval_metric=metrics,
        num_epoch=num_epochs,
        batch_end_callback=mx.callback.Speedometer(8, 4),
    )


request = json.load(sys.stdin)
if "num_epochs" in request:
    stderr = os.dup(2)
    os.dup2(os.open(request["log"], os.O_WRONLY | os.O_CREAT), 2)
    train(request["num_epochs"])
    os.dup2(stderr, 2)
script = os.path.join(os.path.dirname(mx.__file__), "tools", "parse_log.py")
with open(request["table"], "w") as table:
    for arguments in request["arguments"]:
        sys.argv, sys.stdout = [script, request["log"], *arguments], table
        runpy.run_path(script, run_name="__main__")
