"""Log lines: MXNet's exact text, the values that its parse_log finds, and when a speed line is due."""

from __future__ import annotations

import re

from echelon.train.log_lines import (
    Speedometer,
    io_line,
    loaded_line,
    resize_line,
    saved_line,
    speed_line,
    start_line,
    time_line,
    train_line,
    validation_line,
)

EPOCH = (  # in the order in which an epoch prints them
    speed_line(0, 0, 20, 1234.567, {"accuracy": 0.25, "top_k_accuracy_5": 0.75}),
    speed_line(0, 20, 40, 1200.0, {"accuracy": 0.5, "top_k_accuracy_5": 0.875}),
    train_line(0, "accuracy", 0.538261),
    train_line(0, "top_k_accuracy_5", 0.9),
    time_line(0, 70.6139),
    saved_line("models/cifar-0001.params"),
    validation_line(0, "accuracy", 0.666992),
    validation_line(0, "top_k_accuracy_5", 0.95),
)
GOLDEN = """\
Epoch[0] Batch [0-20]\tSpeed: 1234.57 samples/sec\taccuracy=0.250000\ttop_k_accuracy_5=0.750000
Epoch[0] Batch [20-40]\tSpeed: 1200.00 samples/sec\taccuracy=0.500000\ttop_k_accuracy_5=0.875000
Epoch[0] Train-accuracy=0.538261
Epoch[0] Train-top_k_accuracy_5=0.900000
Epoch[0] Time cost=70.614
Saved checkpoint to "models/cifar-0001.params"
Epoch[0] Validation-accuracy=0.666992
Epoch[0] Validation-top_k_accuracy_5=0.950000"""


def test_the_lines_of_an_epoch() -> None:
    assert "\n".join(EPOCH) == GOLDEN


def test_the_lines_before_and_after_epochs() -> None:
    assert resize_line(196) == "Resizing training data to 196 batches per machine"
    assert loaded_line("models/cifar-0007.safetensors") == "Loaded model models/cifar-0007.safetensors"
    assert io_line(19, 2125.0) == "Batch [19]\tSpeed: 2125.00 samples/sec"
    assert speed_line(3, 0, 20, 10.0, {}) == "Epoch[3] Batch [0-20]\tSpeed: 10.00 samples/sec"
    options = {"network": "mlp", "gpus": None, "lr": 0.05, "num_epochs": 20}
    expected = "start with arguments Namespace(network='mlp', gpus=None, lr=0.05, num_epochs=20)"
    assert start_line(options) == expected


def parse_log(lines: list[str]) -> list[tuple[str, int, float]]:
    """Return what MXNet's parse_log finds for the metric accuracy: the first pattern that matches a line."""
    patterns = {
        "train": r".*Epoch\[(\d+)\] Train-accuracy.*=([.\d]+)",
        "validation": r".*Epoch\[(\d+)\] Validation-accuracy.*=([.\d]+)",
        "time": r".*Epoch\[(\d+)\] Time.*=([.\d]+)",
    }
    found = []
    for line in lines:
        matches = ((kind, re.match(pattern, line)) for kind, pattern in patterns.items())
        found += [(kind, int(match[1]), float(match[2])) for kind, match in matches if match][:1]
    return found


def test_parse_log_finds_the_values_and_nothing_else() -> None:
    lines = [f"INFO:root:{line}" for line in (start_line({"lr": 0.1}), *EPOCH)]
    assert parse_log(lines) == [("train", 0, 0.538261), ("time", 0, 70.614), ("validation", 0, 0.666992)]


def test_parse_log_ignores_a_mid_epoch_validation() -> None:
    line = validation_line(3, "accuracy", 0.5, 40)
    assert line == "Epoch[3] Batch [40] Validation-accuracy=0.500000"
    assert parse_log([f"INFO:root:{line}"]) == []


class Clock:
    """A clock that the test advances."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def drive(meter: Speedometer, clock: Clock, epoch: int, batches: range, seconds: float) -> list[tuple[int, int, float]]:
    """Run batches of equal duration; returns the lines that are due."""
    lines = []
    for index in batches:
        clock.now += seconds
        if (line := meter.tick(epoch, index)) is not None:
            lines.append(line)
    return lines


def test_a_speed_line_is_due_every_period_but_not_at_the_first_batch() -> None:
    clock = Clock()
    meter = Speedometer(batch_size=128, every=20, clock=clock)
    assert drive(meter, clock, 0, range(50), 0.5) == [(0, 20, 256.0), (20, 40, 256.0)]


def test_a_new_epoch_starts_the_clock_again() -> None:
    clock = Clock()
    meter = Speedometer(batch_size=10, every=4, clock=clock)
    assert drive(meter, clock, 0, range(7), 1.0) == [(0, 4, 10.0)]
    clock.now += 1000  # validation
    assert drive(meter, clock, 1, range(7), 0.5) == [(0, 4, 20.0)]


def test_epochs_of_one_batch_have_no_speed() -> None:
    clock = Clock()
    meter = Speedometer(batch_size=10, every=1, clock=clock)
    assert [drive(meter, clock, epoch, range(1), 1.0) for epoch in range(3)] == [[], [], []]


def test_after_a_mid_epoch_start_the_first_line_covers_fewer_batches() -> None:
    clock = Clock()
    meter = Speedometer(batch_size=10, every=20, clock=clock)
    assert drive(meter, clock, 2, range(15, 45), 0.5) == [(15, 20, 20.0), (20, 40, 20.0)]


def test_zero_elapsed_time_is_an_infinite_speed() -> None:
    clock = Clock()
    assert drive(Speedometer(1, 1, clock), clock, 0, range(2), 0.0) == [(0, 1, float("inf"))]
