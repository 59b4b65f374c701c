"""The coordinator is lost while a job trains: the run is the undisturbed one all the same."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from megatron_lazarus.elastic.settings import EXIT_DEPOSED
from tests.chaos.job import TrainingJob, training_job
from tests.chaos.nursery import Nursery
from tests.chaos.test_membership_changes import worlds

LONG: dict[str, Any] = {"total_steps": 40, "pause_s": 0.02}
TIMES: dict[str, Any] = {"heartbeat_timeout_s": 2.0, "lease_s": 8.0}


def check_succession(job: TrainingJob, coordinators: int = 2) -> None:
    job.check()
    events = job.events()
    assert job.events_of("listening") == coordinators
    generations = [event["generation"] for event in events]
    assert generations == sorted(generations)


def test_training_goes_on_without_the_coordinator(nursery: Nursery, tmp_path: Path) -> None:
    with training_job(nursery, tmp_path, 4, {**LONG, "save_every": 8}, **TIMES) as job:
        job.add("n0", "n1", "n2", "n3")
        job.wait_for_step(2)
        job.kill_coordinator()
        job.wait_for("listening", term=2)
        job.wait_for_step(job.step() + 3)
        with job.holding():
            job.add("n4")
            job.wait_for("waiting", node="n4")
        job.wait_for("regrouped", world_size=5)
        job.kill_node("n1")
        check_succession(job)
        # Nobody but the newcomer and the victim made a new generation necessary.
        assert worlds(job) == [4, 5, 4]


def test_coordinators_host_dies(nursery: Nursery, tmp_path: Path) -> None:
    """Twice; the second time it is a node that was elected."""
    with training_job(nursery, tmp_path, 5, LONG, **TIMES) as job:
        job.add("n0", "n1", "n2", "n3", "n4")
        job.wait_for_step(2)
        job.kill_coordinators_host("n0")
        job.wait_for("regrouped", world_size=4)
        assert job.kill_coordinators_host("n0") == "n1"
        check_succession(job, 3)
        assert worlds(job) == [5, 4, 3]


@pytest.mark.extensive
@pytest.mark.parametrize("moment", ["failure", "generation", "live"])
def test_coordinator_dies_during_recovery(nursery: Nursery, tmp_path: Path, moment: str) -> None:
    with training_job(nursery, tmp_path, 4, LONG, **TIMES) as job:
        job.add("n0", "n1", "n2", "n3")
        job.wait_for_step(2)
        before = job.events_of(moment)
        job.kill_node("n2")
        job.wait_until(lambda: job.events_of(moment) > before or None, 30, moment)
        job.kill_coordinator()
        check_succession(job)


@pytest.mark.extensive
def test_coordinator_dies_during_a_drain(nursery: Nursery, tmp_path: Path) -> None:
    with training_job(nursery, tmp_path, 4, {**LONG, "section": {"experts": {"min_replicas": 1}}}, **TIMES) as job:
        job.add("n0", "n1", "n2", "n3")
        job.wait_for_step(2)
        with job.holding():
            job.drain("n1")
            job.wait_for("drain", node="n1")
            job.kill_coordinator()
            job.wait_for("listening", term=2)
        job.wait_for("left", node="n1")
        check_succession(job)


@pytest.mark.extensive
def test_a_stopped_coordinator_comes_back_too_late(nursery: Nursery, tmp_path: Path) -> None:
    with training_job(
        nursery, tmp_path, 4, {**LONG, "total_steps": 60, "pause_s": 0.04, "save_every": 10}, **TIMES
    ) as job:
        job.add("n0", "n1", "n2", "n3")
        job.wait_for_step(2)
        job.coordinator_process().send_signal(signal.SIGSTOP)
        job.wait_for("listening", term=2)
        job.coordinator_process(0).send_signal(signal.SIGCONT)
        check_succession(job)
        assert job.coordinator.returncode == EXIT_DEPOSED
        assert worlds(job) == [4]


def test_two_nodes_with_a_shared_lease(nursery: Nursery, tmp_path: Path) -> None:
    lease = tmp_path / "lease"
    with training_job(nursery, tmp_path, 2, LONG, lease_path=str(lease), **TIMES) as job:
        job.add("n0", "n1")
        job.wait_for_step(2)
        job.kill_coordinators_host("n0")
        check_succession(job)
        assert worlds(job) == [2, 1]
    assert list(lease.iterdir()) == []


def test_two_nodes_without_one_end(nursery: Nursery, tmp_path: Path) -> None:
    with training_job(nursery, tmp_path, 2, LONG, **TIMES) as job:
        job.add("n0", "n1")
        job.wait_for_step(2)
        job.kill_coordinators_host("n0")
        assert job.agents["n1"].wait(20) == 1
        assert "1 of 2 agents are left, and more than half must agree" in job.logs()


def test_all_nodes_leave(nursery: Nursery, tmp_path: Path) -> None:
    with training_job(nursery, tmp_path, 3, {**LONG, "save_every": 3}) as job:
        job.add("n0", "n1", "n2")
        job.wait_for_step(4)
        for node in ("n0", "n1", "n2"):
            job.drain(node)
        result = job.end()
        assert result["status"] == "drained", job.logs()
        assert [process.returncode for process in (job.coordinator, *job.agents.values())] == [0, 0, 0, 0]
        assert job.events_of("failure") == 0
