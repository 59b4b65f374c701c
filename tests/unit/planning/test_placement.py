"""Placements against the table of brute-force optima, closed forms, and every loss of fewer than f nodes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import combinations
from math import comb
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lazarus.planning.alignment import align
from megatron_lazarus.planning.allocation import allocate_replicas
from megatron_lazarus.planning.losses import loss_space
from megatron_lazarus.planning.placement import place_replicas
from megatron_lazarus.planning.planner import balance, make_plan, rank_loads
from tests.unit.planning.make_optima import optima

TABLE = Path(__file__).parent / "data" / "optima.txt"


def killing_losses(counts: np.ndarray) -> list[int]:
    """Losses of 1, 2, … nodes after which an expert has no replica, tried one by one."""
    nodes = counts.shape[1]
    return [
        sum(bool((counts[:, sorted(set(range(nodes)) - set(lost))].sum(axis=1) == 0).any()) for lost in losses)
        for losses in (combinations(range(nodes), size) for size in range(1, nodes + 1))
    ]


def table() -> Iterator[tuple[int, int, int, list[int], list[int], list[int]]]:
    for line in TABLE.read_text().splitlines():
        nodes, slots, minimum, *vectors = line.split()
        yield int(nodes), int(slots), int(minimum), *([int(cell) for cell in text.split(",")] for text in vectors)


def test_equals_the_optimum_in_every_small_case():
    rows = list(table())
    assert len(rows) == 1041
    for nodes, slots, minimum, replicas, best, first in rows:
        # In all of these cases one placement is best for every number of lost nodes.
        assert best == first
        counts = place_replicas(replicas, slots, minimum, nodes=nodes)
        assert counts.sum(axis=1).tolist() == replicas
        assert counts.sum(axis=0).max() <= slots
        assert killing_losses(counts) == best, (nodes, slots, minimum, replicas)


def test_table_is_what_its_command_makes():
    """A sample of the table is made again; the whole of it takes the command about 20 seconds."""
    for nodes, slots, minimum, replicas, best, first in list(table())[::29]:
        if nodes * slots <= 12:
            assert optima(nodes, slots, minimum, tuple(replicas)) == (best, first)


@pytest.mark.parametrize("nodes", [2, 5, 10])
def test_closed_form_where_all_experts_fit_on_a_node(nodes):
    for experts in range(1, 7):
        for loads in (np.ones(experts), np.arange(experts), 2.0 ** np.arange(experts)):
            counts = allocate_replicas(loads, nodes, 6, min(2, nodes), ranks=6 * nodes)
            least = min(int(counts.min()), nodes)
            killed = killing_losses(place_replicas(counts, 6, min(2, nodes), nodes=nodes))
            # 1 - P = C(N - r1, k alive) / C(N, k alive) = C(N - r1, lost - r1) / C(N, lost)
            expected = [comb(nodes - least, nodes - lost) for lost in range(1, nodes + 1)]
            assert killed == expected


def test_known_counterexamples_of_the_paper():
    assert killing_losses(place_replicas([2, 2, 2], 2, 2, nodes=3)) == [0, 3, 1]
    assert killing_losses(place_replicas([3, 3, 3, 3], 3, 3, nodes=4))[:2] == [0, 0]
    balanced = allocate_replicas(np.ones(8), 10, 6, 2)
    killed = killing_losses(place_replicas(balanced, 6, 2, nodes=10))
    assert killed[:6] == [0] * 6
    assert 1 - killed[6] / comb(10, 7) >= 0.967 - 0.0005


def survives_every_loss(plan, losses: int) -> bool:
    nodes = sorted(set(plan.rank_nodes))
    for dead in combinations(nodes, losses):
        for layer in plan.layers:
            alive = {
                expert
                for node, row in zip(plan.rank_nodes, layer.slots, strict=True)
                if node not in dead
                for expert in row
            }
            if len(alive) < layer.num_experts:
                return False
    return True


@pytest.mark.parametrize("nodes", range(1, 9))
def test_every_loss_below_the_minimum_is_survived(nodes):
    for slots in (1, 2, 3, 5):
        for experts in (1, 2, 3, 4, 5, 7, 8, 9, 12):
            loads = np.array([np.ones(experts), np.arange(experts), 3.0 ** np.arange(experts)])
            for minimum in range(1, nodes + 1):
                if minimum * experts > nodes * slots:
                    continue
                plan = make_plan(loads, range(nodes), slots, minimum)
                assert survives_every_loss(plan, minimum - 1), (nodes, slots, experts, minimum)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_every_expert_has_its_promised_distinct_nodes(data):
    """Beyond exhaustive sizes, uneven nodes and several ranks a node included; also where slots are short."""
    nodes = data.draw(st.integers(2, 40))
    rank_nodes = [node for node in range(nodes) for _ in range(data.draw(st.integers(1, 3)))]
    slots = [data.draw(st.integers(1, 5)) for _ in rank_nodes]
    experts = data.draw(st.integers(1, min(sum(slots), 60)))
    minimum = data.draw(st.integers(1, min(nodes, 5)))
    loads = [data.draw(st.lists(st.integers(0, 1000), min_size=experts, max_size=experts)) for _ in range(2)]
    use_domains = data.draw(st.booleans())
    domains = {node: data.draw(st.integers(0, 3)) for node in range(nodes)} if use_domains else None
    weights = {node: data.draw(st.integers(1, 4)) for node in range(nodes)} if data.draw(st.booleans()) else None
    plan = make_plan(loads, rank_nodes, slots, minimum, domains=domains, weights=weights)
    node_slots = [sum(s for s, n in zip(slots, rank_nodes, strict=True) if n == node) for node in range(nodes)]
    replicas = allocate_replicas(loads, nodes, node_slots, minimum, len(rank_nodes))
    for layer, counts in zip(plan.layers, replicas, strict=True):
        assert layer.replica_counts().sum(axis=1).tolist() == counts.tolist()
        assert all(len(row) <= room for row, room in zip(layer.slots, slots, strict=True))
        for expert in range(experts):
            distinct = len({rank_nodes[rank] for rank in layer.holders(expert)})
            assert distinct >= min(minimum, counts[expert])


def test_domains_hold_replicas_apart():
    """Two racks of three nodes: either rack alone keeps every expert, which node-wise placement does not give."""
    loads = np.ones((2, 4))
    racks = {0: "a", 1: "a", 2: "a", 3: "b", 4: "b", 5: "b"}
    apart = make_plan(loads, range(6), 2, 2, domains=racks)
    for layer in apart.layers:
        for expert in range(4):
            assert {racks[node] for node in layer.holders(expert)} == {"a", "b"}
    plain = make_plan(loads, range(6), 2, 2)
    assert any(len({racks[node] for node in plain.layers[0].holders(expert)}) == 1 for expert in range(4))


def test_domains_and_distinct_nodes_hold_together_on_uneven_nodes():
    """The share of domain 0 puts two replicas on one node; an exchange parts them and keeps the domains apart."""
    slots, domains = [3, 3, 2, 4, 1, 3], dict(enumerate([2, 2, 0, 1, 0, 1]))
    layer = make_plan([[4, 16, 10, 17]], range(6), slots, 4, domains=domains).layers[0]
    assert all(len(layer.holders(expert)) >= 4 for expert in range(4))
    assert sum(len({domains[node] for node in layer.holders(expert)}) for expert in range(4)) == 11


def test_distinct_nodes_come_before_domains_where_both_cannot_be_had():
    """No exchange between nodes repairs what the domains' shares break here; the promise about nodes is kept."""
    slots, domains = [3, 2, 4, 1, 5, 1], dict(enumerate([2, 1, 2, 0, 1, 2]))
    layer = make_plan([[12, 7]], range(6), slots, 5, domains=domains).layers[0]
    assert all(len(layer.holders(expert)) >= 5 for expert in range(2))


@pytest.mark.parametrize("nodes", [5, 14])
def test_fragile_experts_go_to_reliable_nodes(nodes):
    """E <= c: the expert with fewest replicas decides, so it belongs on the two nodes that fail least."""
    weights = [1 if node in (1, 3) else 9 for node in range(nodes)]
    counts = place_replicas([2, nodes, nodes], 3, 2, nodes=nodes, weights=weights)
    assert np.flatnonzero(counts[0]).tolist() == [1, 3]


def weighted_loss(supports: list[set[int]], weights: list[float], size: int) -> float:
    return sum(
        float(np.prod([weights[node] for node in lost]))
        for lost in combinations(range(len(weights)), size)
        if any(support <= set(lost) for support in supports)
    )


def test_weights_lower_the_expected_loss():
    weights = [1.0, 8.0, 1.0, 8.0, 1.0, 8.0]
    replicas = [2, 2, 2, 2, 2, 2]
    for size in (2, 3):
        losses = [
            weighted_loss([set(np.flatnonzero(row).tolist()) for row in counts], weights, size)
            for counts in (
                place_replicas(replicas, 2, 2, nodes=6, weights=weights),
                place_replicas(replicas, 2, 2, nodes=6),
            )
        ]
        # Best: each pair of experts on one fragile and one reliable node, 3 x 8, instead of 1 + 64 + 8.
        assert losses[0] <= losses[1]
    assert weighted_loss(
        [set(np.flatnonzero(row).tolist()) for row in place_replicas(replicas, 2, 2, nodes=6, weights=weights)],
        weights,
        2,
    ) == pytest.approx(24)


def test_layers_lean_on_the_same_nodes():
    """The paper's shape, Zipf loads in another order per layer: the model survives as often as its worst layer."""
    source = np.random.default_rng(0)
    zipf = 1e6 / np.arange(1, 17)
    loads = np.array([source.permutation(zipf) for _ in range(12)])
    plan = make_plan(loads, range(10), 6, 2)

    def killed(layers) -> list[int]:
        return killing_losses(np.concatenate([layer.replica_counts() for layer in layers]))

    assert killed(plan.layers) == killed(plan.layers[:1])
    assert 1 - killed(plan.layers)[3] / comb(10, 4) >= 0.614


def test_renaming_nodes_brings_layers_together():
    """Two layers that differ in the names of two nodes are killed by the same losses again, unless the nodes differ."""
    counts = place_replicas([2, 2, 3, 3, 4, 4], 3, 2, nodes=6)
    improved = 0
    for one, two in combinations(range(6), 2):
        order = list(range(6))
        order[one], order[two] = two, one
        apart = [counts, counts[:, order]]
        together = align(apart, loss_space(6), np.zeros(6, dtype=np.int64))
        assert killing_losses(np.concatenate(together)) == killing_losses(counts)
        for before, after in zip(apart, together, strict=True):
            assert sorted(map(tuple, before.T.tolist())) == sorted(map(tuple, after.T.tolist()))
        unlike = align(apart, loss_space(6), np.arange(6))
        assert all((before == after).all() for before, after in zip(apart, unlike, strict=True))
        improved += killing_losses(np.concatenate(apart)) != killing_losses(counts)
    assert improved > 5


def test_load_is_even_where_survival_leaves_a_choice():
    assert balance(make_plan(np.ones((1, 8)), range(10), 6, 2), np.ones((1, 8)))[0] < 1.05
    loads = np.random.default_rng(0).integers(50, 150, (4, 32))
    plan = make_plan(loads, [node for node in range(4) for _ in range(4)], 8, 4)
    assert balance(plan, loads).max() < 1.1


SCRIPT = """
import numpy as np
from megatron_lazarus.planning.planner import make_plan
from megatron_lazarus.planning.mapping import map_plan
from megatron_lazarus.planning.migration import migration
source = np.random.default_rng(7)
for shape, nodes, domains in (((6, 8), 10, None), ((3, 40), 30, None), ((2, 9), 8, {n: "ab"[n % 2] for n in range(8)})):
    old, new = (make_plan(source.integers(0, 99, shape), range(nodes), 6, 2, domains=domains) for _ in range(2))
    plan = map_plan(old, new, domains=domains)
    print(plan.digest(), migration(old, plan).moves.sum(axis=0).tolist(), migration(old, plan).transfers)
"""


def test_same_plan_in_every_process_and_hash_seed():
    outputs = {
        subprocess.run(
            [sys.executable, "-c", SCRIPT], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("0", "1", "4242")
    }
    assert len(outputs) == 1
    assert outputs.pop()


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: make_plan([[1, 1]], [], 2, 1), "rank_nodes is empty"),
        (lambda: make_plan([1, 1], [0], 2, 1), r"loads has shape \(2,\)"),
        (lambda: make_plan([[1, 1]], [0, 1], 2, 3), "min_replicas is 3; it must be an integer from 1 to 2"),
        (lambda: make_plan([[1, 1, 1]], [0], 2, 1), "slots gives 2 slots for 3 experts"),
        (lambda: make_plan([[1, -1]], [0], 2, 1), r"loads\[0, 1\] is -1.0"),
        (lambda: make_plan([[1]], [0, -1], 2, 1), r"rank_nodes\[1\] is -1"),
        (lambda: make_plan([[1]], [0, 1], [2], 1), "slots_per_rank has 1 entries"),
        (lambda: make_plan([[1]], [0, 1], 2, 1, domains={0: "a", 7: "b"}), r"domains names unknown nodes \[7\]"),
        (lambda: make_plan([[1]], [0, 1], 2, 1, domains={0: "a"}), r"domains has no entry for nodes \[1\]"),
        (lambda: make_plan([[1]], [0, 1], 2, 1, weights={0: 1, 1: 0}), r"weights\[1\] is 0.0; .* above 0"),
        (lambda: place_replicas([3, 2], 2, 1, nodes=2), "slots gives 4 slots for 5"),
        (lambda: place_replicas([0, 2], 2, 1, nodes=2), r"replicas\[0\] is 0"),
        (lambda: place_replicas([2, 2, 2], [4, 1, 1], 2), "distinct nodes"),
        (lambda: balance(make_plan([[1]], [0], 2, 1), [[1, 2]]), r"loads has shape \(1, 2\)"),
    ],
)
def test_bad_input_is_named_with_the_legal_range(call, says):
    with pytest.raises(ValueError, match=says):
        call()


def test_balance_decides_where_any_loss_kills_an_expert() -> None:
    """Eight experts on two nodes of five slots: no survival to protect, so the two spare replicas even out the load."""
    loads = np.array([[8000.0] + [1000.0] * 7])
    plan = make_plan(loads, [0, 1], 5, 1)
    assert rank_loads(plan, loads)[0].tolist() == [7500.0, 7500.0]
    assert all(len(set(row)) == len(row) for row in plan.layers[0].slots), "no expert twice on one node"
