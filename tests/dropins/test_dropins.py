"""The drop-ins beside the libraries: one worker has the same bits, two in lock-step equal the library's own DDP."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import LIMIT_S, Program, Results, assert_close, assert_same_bits

import tolerances

pytestmark = [pytest.mark.dropins, pytest.mark.timeout(2 * LIMIT_S)]

LIGHTNING = Program(
    "lightning",
    ("plain", "clipped", "accumulated", "bfloat16", "adversaries", "adam", "resumed"),
    alone="auto",
    ddp="ddp_find_unused_parameters_true",
)
TRANSFORMERS = Program(
    "transformers", ("plain", "clipped", "accumulated", "bfloat16", "uninterrupted", "interrupted", "best")
)
ACCELERATE = Program("accelerate", ("plain", "clipped", "accumulated", "stream", "restored"))
CASES = [(program, case) for program in (LIGHTNING, TRANSFORMERS, ACCELERATE) for case in program.cases]
IDS = [f"{program.name}-{case}" for program, case in CASES]

STEPS = 28  # of a run, at most
ADAM = 10.0  # divides by small numbers, which magnifies their error
TOLERANCE = tolerances.reordering(torch.float32, 2, STEPS, ADAM)  # each worker's own gradient has the same bits

Run = Callable[[Program, str], list[Results]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return the results of a program by rank: "alone", "ddp", or with a store. Each runs once."""

    @cache
    def run_once(program: Program, how: str) -> list[Results]:
        folder = tmp_path_factory.mktemp(f"{program.name}-{how}")
        if how == "ddp":
            return program.ddp(folder)
        if how == "dist_sync":
            return program.job(folder, how)
        return [program.alone(folder, None if how == "alone" else how)]

    return run_once


def numbers(result: dict[str, Any]) -> dict[str, list[float]]:
    """Return all that a case has measured, besides the weights."""
    measured = {name: [value] for name, value in result["metrics"].items()}
    return measured | {name: result[name] for name in ("steps", "losses", "norms") if name in result}


@pytest.mark.parametrize(("program", "case"), CASES, ids=IDS)
def test_one_worker_has_the_bits_of_the_library_alone(program: Program, case: str, run: Run) -> None:
    [alone], [worker] = run(program, "alone"), run(program, "local")
    assert_same_bits(worker[case]["weights"], alone[case]["weights"])
    assert numbers(worker[case]) == numbers(alone[case])


@pytest.mark.parametrize(("program", "case"), CASES, ids=IDS)
def test_two_workers_equal_the_ddp_of_the_library(program: Program, case: str, run: Run) -> None:
    for worker, ddp in zip(run(program, "dist_sync"), run(program, "ddp"), strict=True):
        assert_close(worker[case]["weights"], ddp[case]["weights"], TOLERANCE)
        for name, wanted in numbers(ddp[case]).items():
            assert numbers(worker[case])[name] == pytest.approx(wanted, rel=TOLERANCE), name


@pytest.mark.parametrize(
    ("program", "whole", "resumed"),
    [(LIGHTNING, "adam", "resumed"), (TRANSFORMERS, "uninterrupted", "interrupted")],
    ids=["lightning", "transformers"],
)
def test_two_workers_resume_with_the_bits_of_an_uninterrupted_run(
    program: Program, whole: str, resumed: str, run: Run
) -> None:
    for worker in run(program, "dist_sync"):
        assert_same_bits(worker[resumed]["weights"], worker[whole]["weights"])


ASYNCHRONOUS = {
    "lightning": ("adam", "adversaries", "uneven"),
    "transformers": ("plain", "best"),
    "accelerate": ("plain", "restored"),
}


@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_asynchronous_workers_end_with_the_updates_of_all(name: str, tmp_path: Path) -> None:
    first, second = Program(name, ASYNCHRONOUS[name]).job(tmp_path, "dist_async")
    for case in ASYNCHRONOUS[name]:
        assert_same_bits(first[case]["weights"], second[case]["weights"])
        for name, value in first[case]["metrics"].items():
            assert second[case]["metrics"][name] == value


def test_lightning_refuses_unequal_numbers_of_batches_where_workers_wait(tmp_path: Path) -> None:
    with Program("lightning", ["uneven"]).started_job(tmp_path, "dist_sync") as job:
        assert job.wait(LIMIT_S) != 0
        assert "the workers have [4, 6] batches per epoch, but those of dist_sync wait for each other" in job.out


def test_a_worker_of_lightning_that_fails_ends_the_job_with_its_error(tmp_path: Path) -> None:
    with Program("lightning", ["broken"]).started_job(tmp_path, "dist_sync") as job:
        assert job.wait(LIMIT_S) != 0
        assert job.out.count("RuntimeError: the third batch is broken") == 1


def test_accelerate_equals_its_ddp_without_servers(tmp_path: Path, run: Run) -> None:
    for worker, ddp in zip(ACCELERATE.job(tmp_path, "dist_sync", num_servers=0), run(ACCELERATE, "ddp"), strict=True):
        for case in ACCELERATE.cases:
            assert_close(worker[case]["weights"], ddp[case]["weights"], TOLERANCE)


def test_accelerate_refuses_to_clip_the_gradient_of_one_worker(tmp_path: Path) -> None:
    with Program("accelerate", ["clipped_by_hand"]).started_job(tmp_path, "dist_sync") as job:
        assert job.wait(LIMIT_S) != 0
        assert "pass Accelerator(max_grad_norm=0.05), which clips the gradient of all workers" in job.out
