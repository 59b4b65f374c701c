"""A cloud takes a host back: its node hands over what only it holds, and nothing is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.chaos.job import training_job
from tests.chaos.nursery import Nursery
from tests.chaos.test_membership_changes import worlds
from tests.elastic.metadata import metadata_server

GRACE_S = 20.0


@pytest.mark.parametrize("cloud", ["aws", "gcp", "azure"])
def test_notice_drains_the_node(nursery: Nursery, tmp_path: Path, cloud: str) -> None:
    # Every expert is on one node only.
    options: dict[str, Any] = {"total_steps": 24, "pause_s": 0.05}
    options["section"] = {"experts": {"min_replicas": 1, "slots_per_rank": None}}
    with metadata_server() as server, training_job(nursery, tmp_path, 3, options, drain_grace_s=GRACE_S) as job:
        job.add("n0", "n2")
        job.add("n1", CHAOS_SPOT=cloud, CHAOS_SPOT_URL=server.url)
        job.wait_for_step(2)
        server.notice = True
        left = job.wait_for("left", node="n1")
        # It compares the trajectory and every sample with the undisturbed run's, and finds no failure of any node:
        # whoever has not left when the grace is over is killed, which is one.
        job.check()
        assert worlds(job) == [3, 2]
        assert left["generation"] >= 1
        assert job.events_of("lost_experts") == 0
