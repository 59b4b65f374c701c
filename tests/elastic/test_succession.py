"""Jobs of real processes that lose their coordinator. Every job ends with the state of an undisturbed one (loop.py)."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from megatron_lazarus.elastic.settings import EXIT_DEPOSED
from tests.elastic.harness import LocalJob, local_job
from tests.elastic.test_jobs import completed, failures, working

pytestmark = pytest.mark.distributed

TIMES: dict[str, Any] = {"heartbeat_timeout_s": 2.0, "lease_s": 10.0}


def wait_for_successor(job: LocalJob, term: int = 2) -> None:
    job.wait_for("listening", term=term)


def generations(job: LocalJob) -> list[int]:
    """Of the events, in the order in which they were written."""
    return [event["generation"] for event in job.events()]


def test_a_killed_coordinator_is_replaced(tmp_path: Path) -> None:
    with local_job(tmp_path, "a", "b", "c", **TIMES) as job:
        working(job)
        workers = {node: job.worker(node).pid for node in "abc"}
        job.coordinator.kill()
        wait_for_successor(job)
        job.wait_for("live", generation=1)
        # It forms generations as the one before did.
        job.add("d")
        working(job, generation=2)
        job.kill_node("b")
        working(job, generation=3)
        assert [job.worker(node).pid for node in "ac"] == [workers["a"], workers["c"]]
        completed(job, generation=3, world_size=3)
        assert failures(job) == [("b", "died")]
        assert generations(job) == sorted(generations(job))


@pytest.mark.extensive
def test_coordinator_and_node_killed_at_once(tmp_path: Path) -> None:
    """As if the coordinator's host had died. The first candidate is gone, too."""
    with local_job(tmp_path, "a", "b", "c", "d", **TIMES) as job:
        working(job)
        job.coordinator.kill()
        job.kill_node("a")
        working(job, generation=2)
        completed(job, generation=2, world_size=3)
        assert [node for node, _ in failures(job)] == ["a"]


@pytest.mark.extensive
def test_successors_host_dies_too(tmp_path: Path) -> None:
    with local_job(tmp_path, "a", "b", "c", "d", "e", **TIMES) as job:
        working(job)
        job.coordinator.kill()
        wait_for_successor(job)
        job.kill_node("a")
        wait_for_successor(job, term=3)
        working(job, generation=2)
        completed(job, generation=2, world_size=4)


def test_a_stopped_coordinator_never_rules_again(tmp_path: Path) -> None:
    with local_job(tmp_path, "a", "b", "c", **TIMES) as job:
        working(job)
        job.coordinator.send_signal(signal.SIGSTOP)
        wait_for_successor(job)
        job.kill_node("c")
        working(job, generation=2)
        before = job.events()
        job.coordinator.send_signal(signal.SIGCONT)
        assert job.coordinator.wait(10) == EXIT_DEPOSED
        working(job, generation=2)
        completed(job, generation=2, world_size=2)
        assert [node for node, _ in failures(job)] == ["c"]
        assert job.events()[: len(before)] == before


@pytest.mark.extensive
def test_half_of_the_agents_elect_nobody(tmp_path: Path) -> None:
    with local_job(tmp_path, "a", "b", **TIMES) as job:
        working(job)
        job.coordinator.kill()
        job.kill_node("a")
        assert job.agents["b"].wait(30) == 1
        assert "1 of 2 agents are left, and more than half must agree" in (tmp_path / "agent-b.log").read_text()
        assert not (tmp_path / "result.json").exists()


@pytest.mark.extensive
def test_half_of_the_agents_go_on_with_a_shared_lease(tmp_path: Path) -> None:
    lease = tmp_path / "lease"
    with local_job(tmp_path, "a", "b", lease_path=str(lease), **TIMES) as job:
        working(job)
        (folder,) = lease.iterdir()
        assert [path.name for path in folder.iterdir()] == ["term-00000001"]
        job.coordinator.kill()
        job.kill_node("a")
        working(job, generation=2)
        completed(job, generation=2, world_size=1)
        assert list(lease.iterdir()) == []
