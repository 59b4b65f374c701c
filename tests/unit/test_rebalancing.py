"""When experts move: the rule, with times and loads given by the test."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_lazarus.config import ConfigError, ExpertsConfig, LazarusConfig
from megatron_lazarus.moe.dispatch import replica_quotas
from megatron_lazarus.moe.expert_clock import ExpertClock
from megatron_lazarus.placing import plan_for
from megatron_lazarus.planning.plan import Placement, Plan
from megatron_lazarus.rebalancing import Rebalancer, busiest_tokens, decide

RULE: dict[str, Any] = {"seconds_per_token": 0.001, "interval": 100, "min_gain": 0.05, "step_s": 1.0}


def test_a_change_must_save_its_own_cost_and_the_wanted_gain():
    before, after = np.array([[400.0, 200.0], [200.0, 200.0]]), np.array([[220.0, 200.0], [220.0, 200.0]])
    # 160 tokens less on the busiest ranks, 1 ms each, 100 steps: 16 s of 100 s.
    assert decide(before, after, move_s=10.9, **RULE).adopted
    assert not decide(before, after, move_s=11.1, **RULE).adopted
    look = decide(before, after, move_s=1.0, **RULE)
    assert look.gain_s == pytest.approx(16.0)
    assert look.balance == pytest.approx((1.5, 1.1))
    assert not decide(after, before, move_s=0.0, **RULE).adopted
    assert not decide(before, before, move_s=0.0, **{**RULE, "min_gain": 0.0}).adopted


def test_busiest_tokens_counts_every_replica_of_a_rank():
    plan = Plan((Placement(3, ((0, 0, 1), (1, 2, 0))),), (0, 1))
    # Expert 0: three replicas, two of them on rank 0; expert 1: one on each.
    assert busiest_tokens(plan, [np.array([30.0, 10.0, 2.0])], replica_quotas).tolist() == [[25.0, 21.0]]


def test_the_wanted_balance_is_that_of_the_configuration():
    loads, nodes = [np.array([1.0] * 7 + [8.0])], range(5)
    first, even = (ExpertsConfig(slots_per_rank=4, max_imbalance=limit) for limit in (None, 1.1))
    found = [
        busiest_tokens(plan_for(loads, config, nodes), [1000 * loads[0]], replica_quotas) for config in (first, even)
    ]
    assert found[0][0, 0] > 1.5 * found[0][0, 1]
    assert found[1][0, 0] < 1.1 * found[1][0, 1]


class Experts:
    """What the rebalancer needs of an ExpertState, in a world whose other ranks are imagined."""

    rank, quotas, last_moved_bytes = 0, staticmethod(replica_quotas), 0

    def __init__(self, plan: Plan) -> None:
        self.plan, self.layers, self.loads = plan, [SimpleNamespace(clock=self)], [np.ones(8)]
        self.changes = 0

    def take(self) -> tuple[float, int]:
        return 0.1, 1000

    def moved_bytes(self, plan: Plan) -> int:
        return 1000

    def change_plan(self, plan: Plan, rank: int) -> None:
        self.plan = plan
        self.changes += 1


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("megatron_lazarus.rebalancing.broadcast_json", lambda value, source: value)
    config = ExpertsConfig(slots_per_rank=5, min_replicas=1, rebalance_interval=10)
    experts = Experts(plan_for([np.ones(8)], config, (0, 1)))
    written: list[Any] = []
    monitor = SimpleNamespace(enabled=True, write_events=written.extend)
    rebalancer = Rebalancer(SimpleNamespace(monitor=monitor, global_samples=77), experts, config)
    return rebalancer, experts, written


def looks(rebalancer: Rebalancer, experts: Experts, loads: Any, count: int) -> list[dict[str, Any]]:
    told: list[dict[str, Any]] = []
    rebalancer.report = lambda kind, **fields: told.append({"kind": kind, **fields})
    for look in range(count):
        for _ in range(10):
            rebalancer.observe(0.25)
        experts.loads = [loads(look)]
        rebalancer.run(10 * (look + 1))
    return [entry for entry in told if entry["kind"] == "rebalance"]


def test_noise_moves_nothing_and_a_drift_moves_once(make):
    rebalancer, experts, written = make
    source = np.random.default_rng(0)
    steady = looks(rebalancer, experts, lambda _: 100 * np.exp(source.normal(0, 0.05, 8)), 50)
    assert experts.changes == 0
    assert not any(look["adopted"] for look in steady)
    hot = np.array([100.0, 100, 100, 2000, 100, 100, 100, 100])
    moved = looks(rebalancer, experts, lambda _: hot * np.exp(source.normal(0, 0.05, 8)), 50)
    assert experts.changes == 1
    assert [look["adopted"] for look in moved[:2]] == [True, False]
    assert moved[0]["observed_s"] is None
    assert moved[1]["observed_s"] is not None
    assert all(look["observed_s"] is None for look in moved[2:])
    # DeepSpeed's monitor: one value for the layer, one for each of its experts, at every look.
    assert len(written) == 100 * 9
    assert {samples for _, _, samples in written} == {77}
    assert ("Train/Experts/layer0/tokens/expert3", experts.loads[0][3], 77) in written


def test_due_at_every_interval_unless_placed_anew(make):
    rebalancer, _, _ = make
    assert [step for step in range(45) if rebalancer.due(step)] == [10, 20, 30, 40]
    rebalancer.settled(20)
    assert not rebalancer.due(20)
    assert rebalancer.due(30)


def test_never_due_in_a_world_of_one_or_without_interval():
    config = ExpertsConfig(slots_per_rank=8, min_replicas=1, rebalance_interval=10)
    alone = Experts(plan_for([np.ones(8)], config, (0,)))
    assert not Rebalancer(SimpleNamespace(), alone, config).due(10)
    off = ExpertsConfig(slots_per_rank=5, min_replicas=1, rebalance_interval=None)
    assert not Rebalancer(SimpleNamespace(), Experts(plan_for([np.ones(8)], off, (0, 1))), off).due(200)


def test_clock_counts_tokens_and_the_time_inside():
    clock = ExpertClock()
    for _ in range(3):
        with clock.running(torch.zeros(7, 2)):
            time.sleep(0.02)
    seconds, tokens = clock.take()
    assert tokens == 21
    assert seconds >= 0.06
    assert clock.take() == (0.0, 0)


@pytest.mark.parametrize(
    ("key", "value", "legal"),
    [
        ("split", "even", "'quota', 'balanced'"),
        ("rebalance_interval", 0, "at least 1"),
        ("max_imbalance", 0.5, "at least 1"),
        ("rebalance_min_gain", 1.0, "below 1"),
        ("rebalance_min_gain", -0.1, "at least 0"),
    ],
)
def test_bad_settings_are_refused_by_name(key: str, value: Any, legal: str):
    with pytest.raises(ConfigError, match=legal) as refusal:
        LazarusConfig.from_json({"experts": {key: value}})
    assert f"lazarus.experts.{key}" in str(refusal.value)
