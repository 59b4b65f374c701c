"""A member dies, or misses an outcome, at every point of the step protocol and of recovery.

The run is the undisturbed one in any case.
"""

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


@pytest.mark.parametrize("point", ["before-vote", "evaluation", "saved", "built", "migration", "settled"])
def test_outcome_that_some_members_did_not_get(nursery: Nursery, tmp_path: Path, point: str) -> None:
    """The last collective completes on one member or on some: the others take its outcome over and do not redo it."""
    with training_job(
        nursery, tmp_path, 3, {"eval_every": 2, "save_every": 2}, max_recoveries_without_progress=9
    ) as job:
        # What belongs to recovery needs a first failure, which another lost vote is.
        cause = "" if point in ("before-vote", "evaluation", "saved") else "before-vote:{}:lose,"
        faults: dict[str, list[str]] = {"n0": [], "n1": [], "n2": []}
        for step, losers in ((2, ("n0",)), (4, ("n1", "n2")), (6, ("n0", "n1"))):
            for node in losers:
                faults[node].append(cause.format(step) + f"{point}:{step}:lose")
        for node, listed in faults.items():
            job.add(node, fault=",".join(listed))
        ledger = job.check()
        if point == "before-vote":
            # Two have missed it, or one: nobody does the step again for that.
            assert len(ledger.of("sample")) == 8 * 6


@pytest.mark.parametrize("losers", [("n0",), ("n1",), ("n0", "n2")])
def test_change_of_the_world_that_some_members_did_not_get(
    nursery: Nursery, tmp_path: Path, losers: tuple[str, ...]
) -> None:
    """A node with last replicas leaves while another joins; whoever misses that they agreed on it does it again."""
    options = {"total_steps": 24, "section": {"experts": {"min_replicas": 1}}}
    with training_job(nursery, tmp_path, 3, options) as job:
        for node in ("n0", "n1", "n2"):
            job.add(node, fault="change:2:lose" if node in losers else "")
        job.wait_for_step(2)
        job.drain("n1")
        job.add("n3")
        job.check()
        assert job.events_of("left") == 1
