"""Experts follow the load while training runs, and the training does not notice."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.drifting import force, least_unevenness, moving, on_two, unevenness
from tests.distributed.pool import Pools
from tests.distributed.runs import Run, assert_replicas_equal, build, relative, train

pytestmark = pytest.mark.distributed

EXPERTS = 8
ADAPTIVE = {"experts": {"slots_per_rank": 5, "min_replicas": 1, "rebalance_interval": 20, "rebalance_min_gain": 0.0}}


def drifting_run(
    rank: int, world: int, run: Run, pattern: str, adaptive: bool, every: int = 100, rationed: bool = True
) -> dict[str, Any]:
    section = {"experts": {**ADAPTIVE["experts"], **run.section.get("experts", {})}}
    if not adaptive:
        section["experts"]["rebalance_interval"] = None
    engine, ledger = build(rank, world, Run(**{**vars(run), "section": section}))
    measure = least_unevenness if section["experts"].get("split") == "balanced" else unevenness
    shares = moving(EXPERTS, every) if pattern == "moving" else on_two(EXPERTS)
    force(engine, shares)
    for layer in engine.experts.layers:
        # A tiny model's experts take no time worth saving, and times vary: here a token takes 3 x 10 ms.
        layer.clock.take = lambda: (0.01, 1)
    if not rationed:
        engine.rebalancer._watch.looked = lambda seconds: None
    told: list[dict[str, Any]] = []
    engine.rebalancer.report = lambda kind, **fields: told.append({"kind": kind, **fields})
    losses, uneven = [], []
    for _ in range(run.steps):
        losses += train(engine, ledger, run, 1).losses
        uneven.append(measure(engine.plan, shares(engine.global_steps - 1)))
    assert_replicas_equal(engine)
    return {"losses": losses, "uneven": uneven, "told": told, "counted": engine.experts.counted}


@pytest.mark.parametrize(
    ("world", "pattern", "steps", "split"),
    [
        (2, "moving", 200, "quota"),
        (2, "on two", 60, "quota"),
        (4, "moving", 60, "balanced"),
        (4, "on two", 60, "quota"),
    ],
)
def test_load_is_even_again_after_every_drift(workers: Pools, world: int, pattern: str, steps: int, split: str) -> None:
    section = {"experts": {"split": split, "min_replicas": world // 2}}
    run = Run(experts=EXPERTS, k=1, micro_batches=2, steps=steps, lengths=(30,), section=section)
    static = workers(world)(drifting_run, run, pattern, False, timeout=120)[0]
    moved = workers(world)(drifting_run, run, pattern, True, timeout=120)
    assert relative(moved[0]["losses"], static["losses"]) < 1e-9
    # The first look comes before its time; later ones may be due to wait, until two looks at their time have come.
    late = [step for step in range(steps) if 3 <= step < 100 or step % 100 >= 41]
    even, uneven = (sum(run["uneven"][step] for step in late) / len(late) for run in (moved[0], static))
    print(f"{pattern}, {world} ranks, {split}: busiest rank / mean {even:.3f} adaptive, {uneven:.3f} static")
    assert max(moved[0]["uneven"][step] for step in late) <= 1.10
    assert uneven > 1.15
    looks = [entry for entry in moved[0]["told"] if entry["kind"] == "rebalance"]
    assert (looks[0]["steps"], looks[0]["early"]) == (3, True)
    assert {look["steps"] for look in looks} >= set(range(20, steps, 20))
    assert all(look["early"] for look in looks if look["steps"] % 20)
    adopted = [look for look in looks if look["adopted"]]
    assert 1 <= len(adopted) < len(looks)
    assert all("s wanted" in look["why"] for look in looks)
    assert any(look["observed_s"] is not None for look in looks)
    loads = [entry for entry in moved[0]["told"] if entry["kind"] == "load"]
    assert {entry["layer"] for entry in loads} == {0, 1}
    # 2 micro-batches of 2 x 30 tokens.
    assert all(abs(sum(entry["tokens"]) - 120) <= EXPERTS for entry in loads)
    assert not moved[1]["told"]


def test_a_sudden_change_is_followed_at_once_and_what_was_before_forgotten(workers: Pools) -> None:
    run = Run(
        experts=EXPERTS,
        k=1,
        micro_batches=2,
        steps=60,
        lengths=(30,),
        section={"experts": {"rebalance_interval": 1000}},
    )
    static = workers(2)(drifting_run, run, "moving", False, 20, timeout=120)[0]
    moved = workers(2)(drifting_run, run, "moving", True, 20, False, timeout=120)[0]
    assert relative(moved["losses"], static["losses"]) < 1e-9
    # What loads stand for: two steps of the last change, and those since.
    assert moved["counted"] == pytest.approx(20, abs=1.0)
    # Two steps show a change; the first one of all has no time to be compared with.
    assert [look["steps"] for look in moved["told"] if look["kind"] == "rebalance"] == [3, 22, 42]
    for step, uneven in enumerate(moved["uneven"]):
        if step >= 3 and step % 20 >= 2:
            assert uneven <= 1.10, f"step {step}"


def float32_runs(rank: int, world: int) -> list[list[float]]:
    import torch

    run = Run(experts=EXPERTS, k=2, micro_batches=5, steps=45, dtype=torch.float32, lengths=(30,))
    balanced = Run(**{**vars(run), "section": {"experts": {"split": "balanced"}}})
    return [
        drifting_run(rank, world, one, "moving", adaptive)["losses"]
        for one, adaptive in ((run, False), (run, True), (balanced, True))
    ]


def test_float32_trajectory_and_the_balanced_split(workers: Pools) -> None:
    """With two choices a token, an odd number of micro-batches, and 4 ranks."""
    static, moved, balanced = workers(4)(float32_runs, timeout=120)[0]
    assert relative(moved, static) < 1e-4
    assert relative(balanced, static) < 1e-4
