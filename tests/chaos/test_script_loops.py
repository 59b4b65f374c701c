"""Nodes are lost at every point of loops that scripts drive themselves."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.job import Ledger
from tests.chaos.nursery import Nursery
from tests.chaos.script_job import BATCH, EVERY_SAMPLE, ScriptJob, script_job

POINTS = (
    "in-forward",
    "late-forward",
    "between",
    "before-backward",
    "in-backward",
    "after-backward",
    "dense-reduce",
    "before-reduce",
    "before-vote",
    "after-vote",
    "before-dense-step",
    "after-step",
)
"""Where a node dies: of the engine, and of the script between its calls."""


def extensive(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.extensive)


THREE_POINTS = [
    ("in-forward", "between", "in-backward"),
    ("dense-reduce", "before-vote", "after-vote"),
    *(extensive((point,) * 3) for point in POINTS),
]


def worlds(job: ScriptJob) -> list[int]:
    return [event["world_size"] for event in job.events() if event["kind"] == "regrouped"]


def shares_of_the_lost(job: ScriptJob, ledger: Ledger) -> int:
    """Samples that each lost node would have had in the step it interrupted: as many as every survivor had."""
    found = job.micro_batches_by_step(ledger)
    total = 0
    for before, after in itertools.pairwise(regroups(job)):
        per_rank = Counter(line["pid"] for line in found[after["steps"]])
        total += (before["world_size"] - after["world_size"]) * max(per_rank.values()) * BATCH
    return total


def regroups(job: ScriptJob) -> list[dict[str, int]]:
    steps = {}
    for event in job.events():
        if event["kind"] == "regrouped":
            steps[event["generation"]] = {"world_size": event["world_size"], "steps": event["step"]}
    return [steps[number] for number in sorted(steps)]


@pytest.mark.parametrize("points", THREE_POINTS, ids="-".join)
def test_own_batches(nursery: Nursery, tmp_path: Path, points: tuple[str, ...]) -> None:
    with script_job(nursery, tmp_path, 5, "own", micro_batches=10) as job:
        job.add("n1", "n3")
        for node, step, point in zip(("n0", "n2", "n4"), (1, 3, 5), points, strict=True):
            job.add(node, fault=f"{point}:{step}")
        ledger = job.check()
        assert worlds(job) == [5, 4, 3, 2]
        assert job.lost_and_dropped(ledger) == (shares_of_the_lost(job, ledger), 0)


@pytest.mark.parametrize("points", THREE_POINTS, ids="-".join)
def test_training_data(nursery: Nursery, tmp_path: Path, points: tuple[str, ...]) -> None:
    with script_job(nursery, tmp_path, 5, "own", data=EVERY_SAMPLE) as job:
        job.add("n1", "n3")
        for node, step, point in zip(("n0", "n2", "n4"), (1, 3, 5), points, strict=True):
            job.add(node, fault=f"{point}:{step}")
        ledger = job.check()
        assert worlds(job) == [5, 4, 3, 2]
        assert job.lost_and_dropped(ledger) == (0, 0)


@pytest.mark.parametrize(
    ("loop", "data", "point"),
    [
        ("own", 0, "before-vote"),
        ("own", EVERY_SAMPLE, "in-forward"),
        ("function", EVERY_SAMPLE, "before-vote"),
        extensive("own", 0, "in-forward"),
        extensive("own", EVERY_SAMPLE, "before-vote"),
        extensive("function", EVERY_SAMPLE, "in-forward"),
        extensive("function", 0, "in-forward"),
        extensive("function", 0, "before-vote"),
    ],
)
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
@pytest.mark.parametrize("point", ["in-backward", extensive("before-vote")])
def test_loss_outside_drops_the_step(nursery: Nursery, tmp_path: Path, data: int, point: str) -> None:
    with script_job(nursery, tmp_path, 4, "outside", data, micro_batches=8) as job:
        job.add("n1", "n2", "n3")
        job.add("n0", fault=f"{point}:3")
        ledger = job.check()
        # Two micro-batches of each of four ranks; those of a dataset come again.
        assert job.lost_and_dropped(ledger) == (0 if data else 4 * 2 * BATCH, 1)


@pytest.mark.parametrize("data", [0, EVERY_SAMPLE])
@pytest.mark.parametrize("point", ["in-forward", extensive("between")])
def test_loss_outside_and_nothing_backwarded(nursery: Nursery, tmp_path: Path, data: int, point: str) -> None:
    with script_job(nursery, tmp_path, 4, "outside", data, micro_batches=4) as job:
        job.add("n1", "n2", "n3")
        job.add("n0", fault=f"{point}:3")
        ledger = job.check()
        # One that dies between forward and backward is missed by the others in their backward.
        lost = BATCH if point == "in-forward" else 4 * BATCH
        assert job.lost_and_dropped(ledger) == (0 if data else lost, 0 if point == "in-forward" else 1)


@pytest.mark.parametrize(
    ("loop", "data", "point"),
    [
        ("function", EVERY_SAMPLE, "in-backward"),
        ("small_function", 0, "before-vote"),
        *(
            extensive(loop, data, point)
            for loop in ("function", "small_function")
            for data in (0, EVERY_SAMPLE)
            for point in ("in-forward", "in-backward", "before-vote")
        ),
    ],
)
def test_run_step(nursery: Nursery, tmp_path: Path, loop: str, data: int, point: str) -> None:
    with script_job(nursery, tmp_path, 4, loop, data, micro_batches=8) as job:
        job.add("n1", "n2")
        job.add("n0", fault=f"{point}:2")
        job.add("n3", fault=f"{point}:5")
        ledger = job.check()
        assert worlds(job) == [4, 3, 2]
        assert job.lost_and_dropped(ledger) == (0 if data else shares_of_the_lost(job, ledger), 0)


@pytest.mark.parametrize(("data", "how"), [(0, "kill"), (EVERY_SAMPLE, "lose"), extensive(EVERY_SAMPLE, "kill")])
def test_evaluation_is_repeated(nursery: Nursery, tmp_path: Path, data: int, how: str) -> None:
    """A node dies in it, or does not get what the others have got."""
    with script_job(nursery, tmp_path, 4, "own", data, eval_every=2) as job:
        job.add("n1", "n3")
        for node, step in (("n0", 2), ("n2", 4)):
            job.add(node, fault=f"evaluating:{step}" if how == "kill" else f"evaluated:{step}:lose")
        ledger = job.check()
        assert {line["step"] for line in ledger.of("eval")} == {2, 4, 6, 8}
        assert job.lost_and_dropped(ledger) == (0, 0)


@pytest.mark.parametrize(
    ("loop", "data"),
    [("own", 0), ("function", EVERY_SAMPLE), extensive("own", EVERY_SAMPLE), extensive("function", 0)],
)
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


@pytest.mark.parametrize("data", [0, extensive(EVERY_SAMPLE)])
def test_dropout_is_drawn_again(nursery: Nursery, tmp_path: Path, data: int) -> None:
    with script_job(nursery, tmp_path, 3, "own", data, dropout=0.2) as job:
        job.add("n1", "n2")
        job.add("n0", fault="before-vote:3")
        ledger = job.check()
        assert ledger.of("drew")


@pytest.mark.parametrize(
    ("data", "point"),
    [
        (0, "second"),
        extensive(0, "in-backward"),
        extensive(EVERY_SAMPLE, "second"),
        extensive(EVERY_SAMPLE, "in-backward"),
    ],
)
def test_losses_whose_forwards_were_repeated(nursery: Nursery, tmp_path: Path, data: int, point: str) -> None:
    """The script still has the first forward's output, which was computed again in another world."""
    section = {"experts": {"min_replicas": 3}}
    with script_job(nursery, tmp_path, 4, "two_forwards", data, micro_batches=8, section=section) as job:
        job.add("n2", "n3")
        job.add("n0", "n1", fault=f"{point}:2")
        ledger = job.check()
        assert job.lost_and_dropped(ledger) == (0 if data else 2 * 2 * BATCH, 0)


def test_a_step_whose_inputs_were_overwritten_is_dropped(nursery: Nursery, tmp_path: Path) -> None:
    with script_job(nursery, tmp_path, 4, "one_buffer", micro_batches=8) as job:
        job.add("n1", "n2", "n3")
        job.add("n0", fault="second:3")
        ledger = job.check()
        assert job.lost_and_dropped(ledger) == (4 * 2 * BATCH, 1)
        (event,) = [event for event in job.events() if event["kind"] == "step dropped"]
        assert "changed in place" in event["why"]


@pytest.mark.parametrize(
    ("loop", "data"),
    [("own", EVERY_SAMPLE), extensive("own", 0), extensive("function", EVERY_SAMPLE), extensive("outside", 0)],
)
def test_newcomer_takes_part_in_the_step_that_is_repeated(
    nursery: Nursery, tmp_path: Path, loop: str, data: int
) -> None:
    """Too few are left in the middle of a step: it is done again with whoever comes."""
    settings = {"min_nodes": 2, "join_window_s": 60}
    section = {"experts": {"min_replicas": 3}}
    with script_job(nursery, tmp_path, 3, loop, data, micro_batches=6, settings=settings, section=section) as job:
        job.add("n2")
        job.add("n0", "n1", fault="before-vote:3")
        job.wait_for("failure", node="n0")
        job.add("n3")
        ledger = job.check()
        assert worlds(job) == [3, 2]
        # As many micro-batches as when the step began, not as two ranks would do.
        share = 2 * BATCH
        expected = (0, 0) if data else (4 * share, 1) if loop == "outside" else (2 * share, 0)
        assert job.lost_and_dropped(ledger) == expected
