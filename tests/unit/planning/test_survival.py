"""Survival against trying out every loss, and the sampled interval against the counted value."""

from __future__ import annotations

from itertools import combinations
from math import comb

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lazarus.planning.baselines import compact_plan, paper_plan, spread_plan
from megatron_lazarus.planning.plan import Placement, Plan
from megatron_lazarus.planning.planner import make_plan
from megatron_lazarus.planning.survival import _Model, lost_experts, survival, survival_curve


def tried(plan: Plan, k: int, unit_of: dict[int, object], weights: dict[object, float]) -> float:
    """Probability of survival from trying every set of k units, each weighted by the product of its weights."""
    units = sorted(set(unit_of.values()), key=str)
    total = survived = 0.0
    for dead in combinations(units, k):
        weight = float(np.prod([weights[unit] for unit in dead]))
        total += weight
        alive = [rank for rank, node in enumerate(plan.rank_nodes) if unit_of[node] not in dead]
        if all(
            {e for rank in alive for e in layer.slots[rank]} == set(range(layer.num_experts)) for layer in plan.layers
        ):
            survived += weight
    return survived / total


@st.composite
def plans(draw) -> Plan:
    """Any legal plan: two layers, up to 7 nodes with gaps in their numbers, up to 2 ranks a node."""
    nodes = draw(st.lists(st.integers(0, 20), min_size=1, max_size=7, unique=True))
    rank_nodes = [node for node in nodes for _ in range(draw(st.integers(1, 2)))]
    layers = []
    for _ in range(2):
        experts = draw(st.integers(1, 6))
        rows = [draw(st.lists(st.integers(0, experts - 1), max_size=4)) for _ in rank_nodes]
        for expert in range(experts):
            rows[draw(st.integers(0, len(rows) - 1))].append(expert)
        layers.append(Placement(experts, tuple(map(tuple, rows))))
    return Plan(tuple(layers), tuple(rank_nodes))


@settings(max_examples=60, deadline=None)
@given(plans(), st.data())
def test_counts_what_trying_every_loss_finds(plan, data):
    nodes = sorted(set(plan.rank_nodes))
    weights = {node: float(data.draw(st.integers(1, 5))) for node in nodes}
    domains = {node: data.draw(st.sampled_from("abc")) for node in nodes}
    mean = {
        label: float(np.mean([weights[node] for node in nodes if domains[node] == label]))
        for label in set(domains.values())
    }
    ones = dict.fromkeys(nodes, 1.0)
    own = {node: node for node in nodes}
    for k, point in enumerate(survival_curve(plan)):
        assert point.exact
        assert point.probability == pytest.approx(tried(plan, k, own, ones), abs=1e-12)
    for k, point in enumerate(survival_curve(plan, weights=weights)):
        assert point.probability == pytest.approx(tried(plan, k, own, weights), abs=1e-9)
    for k, point in enumerate(survival_curve(plan, domains=domains, weights=weights)):
        assert point.probability == pytest.approx(tried(plan, k, domains, mean), abs=1e-9)


def test_lost_experts_layer_by_layer():
    plan = Plan((Placement(3, ((0, 1), (1, 2), (2,))), Placement(2, ((0,), (1,), (0, 1)))), (4, 4, 9))
    assert lost_experts(plan, [4]) == ((0, 1), ())
    assert lost_experts(plan, [9]) == ((), ())
    assert lost_experts(plan, []) == ((), ())
    assert lost_experts(plan, [9, 4]) == ((0, 1, 2), (0, 1))


@pytest.mark.parametrize("weighted", [False, True])
def test_sampling_agrees_with_counting(weighted):
    """The 95 % interval of the sampler contains the exact value in all but a few of many draws."""
    plan = make_plan([[1, 2, 3, 4, 5, 6, 7, 8, 9]], range(9), 3, 2)
    model = _Model(plan, None, {node: 1.0 + node for node in range(9)} if weighted else None)
    inside = total = 0
    for k in range(2, 7):
        exact = model.survival(k, 1, 0).probability
        for seed in range(20):
            point = model._sampled(k, 2000, seed)
            inside += point.low <= exact <= point.high
            total += 1
            assert abs(point.probability - exact) < 0.06
    assert inside >= 0.88 * total


def test_lists_losses_where_parts_are_too_large_to_count():
    """30 nodes in one ring of pairs: n / (n - k) C(n - k, k) losses leave
    no two neighbours lost."""
    ring = tuple((node, (node + 1) % 30) for node in range(30))
    plan = Plan((Placement(30, ring),), tuple(range(30)))
    assert survival(plan, 2).probability == pytest.approx(1 - 30 / 435)
    assert survival(plan, 3).probability == pytest.approx(30 / 27 * comb(27, 3) / comb(30, 3))
    sampled = survival(plan, 10, samples=4000)
    exact = 30 / 20 * comb(20, 10) / comb(30, 10)
    assert not sampled.exact
    assert sampled.low <= exact <= sampled.high


def test_large_plans_are_counted_exactly_where_groups_are_apart():
    plan = make_plan(np.ones((2, 64)), range(128), 1, 2)
    point = survival(plan, 2)
    assert point.exact
    assert point.probability == pytest.approx(1 - 64 / (128 * 127 / 2), abs=1e-15)


def test_figures_of_the_paper_and_of_its_error():
    """GPT-S with even loads: the paper's rule leaves two experts on three nodes; published round-robin figures."""
    replicas = np.array([[7, 7, 7, 7, 8, 8, 8, 8]])
    paper = [round(point.probability, 3) for point in survival_curve(paper_plan(replicas, 10, 6))[3:8]]
    assert paper == [0.992, 0.967, 0.917, 0.833, 0.700]
    assert survival(spread_plan(replicas, 10, 6), 7).probability == pytest.approx(0.967, abs=5e-4)
    assert survival(compact_plan(replicas, 10, 6), 2).probability < 1
    # GPT-L's shape, 12 layers: the published 12 % at four losses is round-robin that starts one node further per layer.
    layers = np.full((12, 16), [2] * 10 + [4, 4, 5, 6, 8, 13])
    assert survival(spread_plan(layers, 10, 6), 4).probability == pytest.approx(25 / 210)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda plan: survival(plan, 3), "k is 3; it must be an integer from 0 to 2"),
        (lambda plan: survival(plan, -1), "k is -1"),
        (lambda plan: survival(plan, 1, samples=0), "samples is 0"),
        (lambda plan: survival(plan, 1, domains={0: "a"}), r"domains has no entry for nodes \[1\]"),
        (lambda plan: survival(plan, 1, weights={0: 1, 1: 1, 2: 1}), r"weights names unknown nodes \[2\]"),
        (lambda plan: lost_experts(plan, [5]), r"dead_nodes names unknown nodes \[5\]; legal nodes are \[0, 1\]"),
    ],
)
def test_bad_input_is_named_with_the_legal_range(call, says):
    with pytest.raises(ValueError, match=says):
        call(make_plan([[1, 1]], [0, 1], 2, 1))
