"""A short chaos: one job with random faults and a fixed seed. `make chaos` runs many."""

from __future__ import annotations

from pathlib import Path

from echelon.testing.chaos.campaign import Plan, run


def test_a_job_with_random_faults_ends_well_and_loses_nothing(tmp_path: Path) -> None:
    plan = Plan(minutes=1, seed=3, stores=["dist_ssync"], transports=["tcp"], epochs=25, jobs=1, keep=tmp_path)
    (outcome,) = run(plan)
    output = (tmp_path / "job-0" / "output").read_text()
    assert outcome.hang is None, f"{outcome.hang}\n{output}"
    assert (outcome.status, outcome.report.problems) == (0, []), output
    processes = [kind for kind in outcome.faults if not kind.startswith("message")]
    assert processes, "at least one process was killed, stopped or told to end"
    assert outcome.report.epochs == outcome.setting.epochs
    assert outcome.report.acked > 0
