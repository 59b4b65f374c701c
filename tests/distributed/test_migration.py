"""Records move between ranks while training goes on, and nothing changes but where they are."""

from __future__ import annotations

import random

import pytest

from megatron_lazarus.planning.plan import Placement, Plan
from tests.distributed.pool import Pools
from tests.distributed.runs import Run, assert_replicas_equal, build, relative, run_all

WORLD, EXPERTS = 4, 5


def _plans(count: int) -> list[Plan]:
    source = random.Random(11)
    plans: list[Plan] = []
    while len(plans) < count:
        layers = []
        for _ in range(2):
            rows = [[source.randrange(EXPERTS) for _ in range(source.randint(0, 4))] for _ in range(WORLD)]
            if {expert for row in rows for expert in row} == set(range(EXPERTS)):
                layers.append(Placement(EXPERTS, tuple(map(tuple, rows))))
        if len(layers) == 2:
            plans.append(Plan(tuple(layers), (0, 0, 1, 1)))
    return plans


def wander(rank: int, world: int, run: Run, plans: list[Plan]) -> tuple[list[float], list[int]]:
    """Train, and before every step put the experts somewhere else."""
    engine, ledger = build(rank, world, run)
    losses, moved = [], []
    for plan in plans:
        losses.append(engine.train_batch(ledger.data(run)).loss)
        moved.append(engine.experts.change_plan(plan, rank))
        assert engine.plan == plan
        assert_replicas_equal(engine)
    return losses, moved


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_moving_experts_changes_nothing(workers: Pools, optimizer: str) -> None:
    plans = _plans(12)
    run = Run(experts=EXPERTS, micro_batches=6, steps=len(plans), optimizer=optimizer)
    still = workers(WORLD)(run_all, run, timeout=60)[0][0]
    results = workers(WORLD)(wander, run, plans, timeout=120)
    losses, moved = results[0]
    assert relative(losses, still.losses) < 1e-9
    assert all(other == results[0] for other in results)
    assert min(moved) > 0, "every plan must move something"
