"""Nodes are lost at every point of loops that scripts drive themselves."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.nursery import Nursery
from tests.chaos.script_job import EVERY_SAMPLE, script_job

POINTS = (
    "in-forward",
    "late-forward",
    "between",
    "before-backward",
    "in-backward",
    "dense-reduce",
    "before-reduce",
    "before-vote",
    "after-vote",
    "before-dense-step",
    "after-step",
)


@pytest.mark.parametrize("point", POINTS)
def test_own_batches(nursery: Nursery, tmp_path: Path, point: str) -> None:
    with script_job(nursery, tmp_path, 5, "own", micro_batches=10) as job:
        job.add("n1", "n3")
        for node, step in (("n0", 1), ("n2", 3), ("n4", 5)):
            job.add(node, fault=f"{point}:{step}")
        ledger = job.check()
        assert job.lost_and_dropped(ledger)[1] == 0


@pytest.mark.parametrize("point", POINTS)
def test_training_data(nursery: Nursery, tmp_path: Path, point: str) -> None:
    with script_job(nursery, tmp_path, 5, "own", data=EVERY_SAMPLE) as job:
        job.add("n1", "n3")
        for node, step in (("n0", 1), ("n2", 3), ("n4", 5)):
            job.add(node, fault=f"{point}:{step}")
        ledger = job.check()
        assert job.lost_and_dropped(ledger) == (0, 0)
