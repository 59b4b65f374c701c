"""A member dies at every point of the step protocol and of recovery: the run is the undisturbed one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.faults import RECOVERY_POINTS, STEP_POINTS
from tests.chaos.job import training_job
from tests.chaos.nursery import Nursery


@pytest.mark.parametrize("point", STEP_POINTS)
def test_first_middle_and_last_rank_die_in_a_step(nursery: Nursery, tmp_path: Path, point: str) -> None:
    with training_job(nursery, tmp_path, 5) as job:
        job.add("n1", "n3")
        for node, step in (("n0", 1), ("n2", 3), ("n4", 5)):
            job.add(node, fault=f"{point}:{step}")
        job.check()


@pytest.mark.parametrize("point", RECOVERY_POINTS)
def test_second_failure_during_recovery(nursery: Nursery, tmp_path: Path, point: str) -> None:
    with training_job(nursery, tmp_path, 5) as job:
        job.add("n1", "n4")
        for node, step in (("n3", 2), ("n0", 4)):
            job.add(node, fault=f"{point}:{step}" if node == "n0" else f"before-vote:{step}")
        job.add("n2", fault=f"{point}:2")
        job.check()
