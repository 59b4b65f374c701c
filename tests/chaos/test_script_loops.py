"""Nodes are lost at every point of loops that scripts drive themselves."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.chaos.job import Ledger
from tests.chaos.nursery import Nursery
from tests.chaos.script_job import BATCH, EVERY_SAMPLE, ScriptJob, script_job

POINTS = (
    "in-forward",
    "between",
    "in-backward",
    "before-vote",
    "after-vote",
)
MORE_POINTS = (
    "late-forward",
    "before-backward",
    "dense-reduce",
    "before-reduce",
    "before-dense-step",
    "after-step",
    "after-backward",
)
ALL_POINTS = [*POINTS, *(pytest.param(point, marks=pytest.mark.extensive) for point in MORE_POINTS)]


def worlds(job: ScriptJob) -> list[int]:
    return [event["world_size"] for event in job.events() if event["kind"] == "regrouped"]


def shares_of_the_lost(job: ScriptJob, ledger: Ledger) -> int:
    """Samples that each lost node would have had in the step it interrupted: as many as every survivor had."""
    found = job.micro_batches_by_step(ledger)
    total = 0
    for before, after in zip(*(iter_regroups(job)[at:] for at in (0, 1)), strict=False):
        per_rank = Counter(line["pid"] for line in found[after["steps"]])
        total += (before["world_size"] - after["world_size"]) * max(per_rank.values()) * BATCH
    return total


def iter_regroups(job: ScriptJob) -> list[dict[str, int]]:
    steps = {}
    for event in job.events():
        if event["kind"] == "regrouped":
            steps[event["generation"]] = {"world_size": event["world_size"], "steps": event["step"]}
    return [steps[number] for number in sorted(steps)]


@pytest.mark.parametrize("point", ALL_POINTS)
def test_own_batches(nursery: Nursery, tmp_path: Path, point: str) -> None:
    with script_job(nursery, tmp_path, 5, "own", micro_batches=10) as job:
        job.add("n1", "n3")
        for node, step in (("n0", 1), ("n2", 3), ("n4", 5)):
            job.add(node, fault=f"{point}:{step}")
        ledger = job.check()
        assert worlds(job) == [5, 4, 3, 2]
        assert job.lost_and_dropped(ledger) == (shares_of_the_lost(job, ledger), 0)


@pytest.mark.parametrize("point", ALL_POINTS)
def test_training_data(nursery: Nursery, tmp_path: Path, point: str) -> None:
    with script_job(nursery, tmp_path, 5, "own", data=EVERY_SAMPLE) as job:
        job.add("n1", "n3")
        for node, step in (("n0", 1), ("n2", 3), ("n4", 5)):
            job.add(node, fault=f"{point}:{step}")
        ledger = job.check()
        assert worlds(job) == [5, 4, 3, 2]
        assert job.lost_and_dropped(ledger) == (0, 0)


@pytest.mark.parametrize("loop", ["own", "function"])
@pytest.mark.parametrize("data", [0, EVERY_SAMPLE])
@pytest.mark.parametrize("point", ["in-forward", "before-vote"])
def test_outcome_that_some_members_did_not_get(
    nursery: Nursery, tmp_path: Path, loop: str, data: int, point: str
) -> None:
    """Members are at different calls then; nobody does a step again that somebody has completed."""
    settings = {"max_recoveries_without_progress": 9}
    with script_job(nursery, tmp_path, 3, loop, data, eval_every=2, settings=settings) as job:
        faults: dict[str, list[str]] = {"n0": [], "n1": [], "n2": []}
        for step, losers in ((2, ("n0",)), (4, ("n1", "n2")), (6, ("n0", "n1"))):
            for node in losers:
                faults[node].append(f"{point}:{step}:lose")
        for node, listed in faults.items():
            job.add(node, fault=",".join(listed))
        ledger = job.check()
        assert job.lost_and_dropped(ledger) == (0, 0)
        if point == "before-vote":
            assert len(ledger.of("sample")) == 8 * 6


@pytest.mark.parametrize("data", [0, EVERY_SAMPLE])
@pytest.mark.parametrize("point", ["in-backward", "before-vote"])
def test_loss_outside_drops_the_step(nursery: Nursery, tmp_path: Path, data: int, point: str) -> None:
    with script_job(nursery, tmp_path, 4, "outside", data, micro_batches=8) as job:
        job.add("n1", "n2", "n3")
        job.add("n0", fault=f"{point}:3")
        ledger = job.check()
        # Two micro-batches of each of four ranks; those of a dataset come again.
        assert job.lost_and_dropped(ledger) == (0 if data else 4 * 2 * BATCH, 1)


@pytest.mark.parametrize("data", [0, EVERY_SAMPLE])
@pytest.mark.parametrize("point", ["in-forward", "between"])
def test_loss_outside_and_nothing_backwarded(nursery: Nursery, tmp_path: Path, data: int, point: str) -> None:
    with script_job(nursery, tmp_path, 4, "outside", data, micro_batches=4) as job:
        job.add("n1", "n2", "n3")
        job.add("n0", fault=f"{point}:3")
        ledger = job.check()
        # One that dies between forward and backward is missed by the others in their backward.
        lost = BATCH if point == "in-forward" else 4 * BATCH
        assert job.lost_and_dropped(ledger) == (0 if data else lost, 0 if point == "in-forward" else 1)


@pytest.mark.parametrize("data", [0, EVERY_SAMPLE])
@pytest.mark.parametrize("loop", ["function", "small_function"])
@pytest.mark.parametrize("point", ["in-forward", "in-backward", "before-vote"])
def test_run_step(nursery: Nursery, tmp_path: Path, data: int, loop: str, point: str) -> None:
    with script_job(nursery, tmp_path, 4, loop, data, micro_batches=8) as job:
        job.add("n1", "n2")
        job.add("n0", fault=f"{point}:2")
        job.add("n3", fault=f"{point}:5")
        ledger = job.check()
        assert worlds(job) == [4, 3, 2]
        assert job.lost_and_dropped(ledger) == (0 if data else shares_of_the_lost(job, ledger), 0)


@pytest.mark.parametrize("data", [0, EVERY_SAMPLE])
def test_death_in_an_evaluation(nursery: Nursery, tmp_path: Path, data: int) -> None:
    with script_job(nursery, tmp_path, 4, "own", data, eval_every=2) as job:
        job.add("n1", "n3")
        for node, step in (("n0", 2), ("n2", 4)):
            job.add(node, fault=f"evaluating:{step}")
        ledger = job.check()
        assert {line["step"] for line in ledger.of("eval")} == {2, 4, 6, 8}
        assert job.lost_and_dropped(ledger) == (0, 0)


@pytest.mark.parametrize("loop", ["own", "function"])
@pytest.mark.parametrize("data", [0, EVERY_SAMPLE])
def test_nodes_join_and_leave(nursery: Nursery, tmp_path: Path, loop: str, data: int) -> None:
    options = {"total_steps": 24, "section": {"experts": {"min_replicas": 1}}}
    with script_job(nursery, tmp_path, 3, loop, data, **options) as job:
        job.add("n0", "n1", "n2")
        job.wait_for_step(2)
        with job.holding():
            job.add("n3")
            job.wait_for("waiting", node="n3")
        job.wait_for("regrouped", world_size=4)
        job.drain("n1")
        job.wait_for("left", node="n1")
        job.drain("n0")
        ledger = job.check()
        assert worlds(job) == [3, 4, 3, 2]
        assert job.lost_and_dropped(ledger) == (0, 0)


@pytest.mark.parametrize("data", [0, EVERY_SAMPLE])
def test_dropout_is_drawn_again(nursery: Nursery, tmp_path: Path, data: int) -> None:
    with script_job(nursery, tmp_path, 3, "own", data, dropout=0.2) as job:
        job.add("n1", "n2")
        job.add("n0", fault="before-vote:3")
        ledger = job.check()
        assert ledger.of("drew")
