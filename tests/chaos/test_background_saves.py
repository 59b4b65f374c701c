"""Nodes fail and come while checkpoints are written in the background."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_lazarus.checkpoint.manifest import Manifest, read_latest
from tests.chaos.job import TrainingJob, training_job
from tests.chaos.nursery import Nursery

PARTIAL = {"persist_experts": 2, "keep_last": 2}
LONG: dict[str, Any] = {"total_steps": 24, "pause_s": 0.03, "save_every": 2}


def check_checkpoints(job: TrainingJob, folder: Path) -> None:
    """``latest`` names a checkpoint that is whole, and so is every other one; it is the last one told."""
    told = [event["tag"] for event in job.events() if event["kind"] == "checkpoint"]
    assert told
    tags = [path.parent.name for path in folder.glob("*/manifest.json")]
    for tag in tags:
        Manifest.read(str(folder / tag)).verify(str(folder / tag))
    assert read_latest(str(folder)) == told[-1]
    assert told[-1] == "global_step24", "the last save was to be waited for"


@pytest.mark.parametrize("point", ["saving", "reporting", "published"])
def test_death_while_a_checkpoint_is_written(nursery: Nursery, tmp_path: Path, point: str) -> None:
    """The save in flight is not completed in the next generation; training and the next save are as ever."""
    with training_job(nursery, tmp_path, 4, {**LONG, "section": {"checkpoint": PARTIAL}}) as job:
        job.add("n1", "n2")
        job.add("n0", fault=f"{point}:6")
        job.add("n3", fault=f"{point}:14")
        job.check()
        check_checkpoints(job, tmp_path / "checkpoint")


def test_newcomer_while_a_checkpoint_is_written(nursery: Nursery, tmp_path: Path) -> None:
    """It takes the history of saves over, and can go on with it when all others are gone."""
    options = {**LONG, "section": {"checkpoint": PARTIAL}}
    with training_job(nursery, tmp_path, 2, options) as job:
        job.add("n1", "n2")
        job.wait_for_step(4)
        with job.holding():
            job.add("n3")
            job.wait_for("waiting", node="n3")
        job.wait_for("regrouped", world_size=3)
        job.kill_node("n1")
        job.check()
        check_checkpoints(job, tmp_path / "checkpoint")


def test_lost_experts_are_counted(nursery: Nursery, tmp_path: Path) -> None:
    """Experts whose last replica is gone come from their own last saves; the tokens since are told."""
    section = {"experts": {"min_replicas": 1}, "checkpoint": {"persist_experts": 1, "dynamic_k": False}}
    options = {**LONG, "experts": 8, "section": section}
    with training_job(nursery, tmp_path, 4, options) as job:
        job.add("n0", "n1", "n2")
        job.add("n3", fault="before-vote:9")
        result = job.end()
        assert result["status"] == "completed", job.logs()
        (lost,) = [event for event in job.events() if event["kind"] == "lost tokens"]
        assert lost["tokens"] > 0
        assert 0 < lost["proportion"] < 1
        check_checkpoints(job, tmp_path / "checkpoint")
        newest = Manifest.read(str(tmp_path / "checkpoint" / "global_step24"))
        ledger = newest.ledger
        missing = sum(ledger["assigned"]) - sum(sum(held) for held in ledger["held"])
        assert missing == pytest.approx(lost["tokens"]), json.dumps(ledger)
