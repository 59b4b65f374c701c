"""Processes that survive many generations stay as they were."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.job import Line, training_job
from tests.chaos.nursery import Nursery

CYCLES, WARM_UP = 20, 4


@pytest.mark.extensive
def test_twenty_kills_and_joins_leave_nothing_behind(nursery: Nursery, tmp_path: Path) -> None:
    # So many steps that they do not end before the cycles do.
    options = {"total_steps": 400, "pause_s": 0.005, "micro_batches": 3, "measure": True}
    with training_job(nursery, tmp_path, 3, options) as job:
        job.add("n0", "n1", "x0")
        job.wait_for_step(2)
        for cycle in range(CYCLES):
            job.kill_worker(f"x{cycle}")
            job.add(f"x{cycle + 1}")
            job.wait_until_working(f"x{cycle + 1}")
        generation = max(job.generations())
        assert generation > 2 * CYCLES
        job.wait_for_step(job.step() + 3)
        sizes: dict[str, list[Line]] = {}
        for line in job.ledger().of("size"):
            sizes.setdefault(line["member"], []).append(line)
        survivors = [
            lines for lines in sizes.values() if lines[0]["generation"] == 1 and lines[-1]["generation"] == generation
        ]
        assert len(survivors) == 2
        for lines in survivors:
            before = next(line for line in lines if line["generation"] >= 1 + 2 * WARM_UP)
            after = lines[-1]
            for name in ("threads", "python_threads", "descriptors", "groups"):
                assert after[name] <= before[name], f"{name}: {before[name]} -> {after[name]}"
            assert after["rss"] <= 1.05 * before["rss"], f"rss: {before['rss']} -> {after['rss']}"
