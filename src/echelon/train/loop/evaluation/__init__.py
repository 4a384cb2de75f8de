"""What a run measures between its steps: `evaluate` (a model on validation data), `evaluator` (when, and the target
accuracy) and `learning` (whether the run learns at all).
"""
