"""Random messages to the scheduler and the server of a job that trains: both live on, small, and the job is right."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from jobs import TESTS, Fault, Gate, Job, Plan, until

GROWTH_KB = 64 << 10
ANSWERS = {"Refused", "Failed", "Status", "Done"}  # which show that messages reach the code behind the first checks


@pytest.mark.parametrize(
    "messages", [pytest.param(2_000, id="few"), pytest.param(100_000, id="many", marks=pytest.mark.long)]
)
@pytest.mark.timeout(300)
def test_no_message_hurts_the_scheduler_or_a_server(tmp_path: Path, messages: int) -> None:
    """Workers 0 and 1 train. Worker 2 never pushes: it sends messages (`fuzzing_worker.py`)."""
    waits = [Gate(rank, 4, opened="open") for rank in (0, 1)]
    plan = Plan("dist_async", 3, faults=[Fault("worker", 2, 0)], gates=waits)
    spec = json.dumps({"plan": asdict(plan), "messages": messages, "seed": 13})
    program = [sys.executable, str(TESTS / "fuzz" / "fuzzing_worker.py"), spec]
    with Job(tmp_path, num_workers=3, num_servers=1, command=program) as job:
        until(lambda: (job.run / "warm").exists() or job.launcher.poll() is not None, "the first messages", 100)
        assert job.launcher.poll() is None, job.out + job.err
        pids = [job.pid("scheduler", 0), job.pid("server", 0)]
        before = [resident_kb(pid) for pid in pids]
        until(lambda: (job.run / "fuzzed").exists() or job.launcher.poll() is not None, "the last messages", 200)
        assert job.launcher.poll() is None, job.out + job.err
        after = [resident_kb(pid) for pid in pids]
        assert job.wait() == 0, job.out + job.err
    counts = json.loads((job.run / "fuzzed").read_text())
    assert counts["messages"] >= messages
    assert 0 < counts["closed"] < counts["connections"]
    assert set(counts["answers"]) >= ANSWERS
    assert max(now - then for then, now in zip(before, after, strict=True)) < GROWTH_KB, (before, after)
    assert {rank: row["table"] for rank, row in job.results().items()} == dict.fromkeys((0, 1), plan.table())
    assert (job.run / "events.jsonl").stat().st_size < 1 << 20
    assert "Traceback" not in job.out


def resident_kb(pid: int) -> int:
    """Return the memory of a process in kB."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0])
