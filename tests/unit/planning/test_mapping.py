"""Mapping and migration against brute force over mappings, and against replaying the transfers."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lazarus.planning.mapping import map_plan
from megatron_lazarus.planning.migration import migration
from megatron_lazarus.planning.plan import Plan
from megatron_lazarus.planning.planner import make_plan
from megatron_lazarus.planning.survival import survival_curve


def fetched(current: Plan, plan: Plan, previous: list[int | None], takes: tuple[int, ...]) -> int:
    """Records that have to cross nodes if node n takes part takes[n] of the plan, counted slot by slot."""
    count = 0
    for before, layer in zip(current.layers, plan.layers, strict=True):
        for node, part in enumerate(takes):
            here = [rank for rank, other in enumerate(plan.rank_nodes) if other == node]
            had = {e for rank in here if previous[rank] is not None for e in before.slots[previous[rank]]}
            wanted = [e for rank, other in enumerate(plan.rank_nodes) if other == part for e in layer.slots[rank]]
            count += sum(expert not in had for expert in wanted)
    return count


@st.composite
def changes(draw, most_nodes: int = 5) -> tuple[Plan, Plan, list[int | None] | None, int]:
    """A plan, its successor for other loads, and perhaps a node whose state is lost; slots per rank."""
    nodes, ranks, slots = draw(st.integers(2, most_nodes)), draw(st.integers(1, 3)), draw(st.integers(1, 4))
    experts = draw(st.integers(1, min(8, nodes * ranks * slots)))
    minimum = draw(st.integers(1, nodes))
    rank_nodes = [node for node in range(nodes) for _ in range(ranks)]
    loads = st.lists(st.lists(st.integers(0, 50), min_size=experts, max_size=experts), min_size=2, max_size=2)
    old, new = (make_plan(draw(loads), rank_nodes, slots, minimum) for _ in range(2))
    lost = draw(st.none() | st.integers(0, nodes - 1))
    previous = None if lost is None else [None if node == lost else rank for rank, node in enumerate(rank_nodes)]
    return old, new, previous, slots


@settings(max_examples=80, deadline=None)
@given(changes())
def test_mapping_equals_brute_force(change):
    old, new, previous, _ = change
    mapped = map_plan(old, new, previous_ranks=previous)
    work = migration(old, mapped, previous_ranks=previous)
    ranks = previous or list(range(new.world_size))
    least = min(fetched(old, new, ranks, takes) for takes in permutations(range(max(new.rank_nodes) + 1)))
    assert work.between_nodes + len(work.missing) == least
    assert survival_curve(mapped) == survival_curve(new)


@pytest.mark.parametrize("nodes", [6, 7])
def test_mapping_equals_brute_force_up_to_seven_nodes(nodes):
    source = np.random.default_rng(nodes)
    for _ in range(2):
        old, new = (make_plan(source.zipf(1.5, (2, 8)), range(nodes), 4, 2) for _ in range(2))
        work = migration(old, map_plan(old, new))
        assert work.between_nodes == min(
            fetched(old, new, list(range(nodes)), takes) for takes in permutations(range(nodes))
        )


def test_mapping_moves_no_more_than_a_thousand_random_ones():
    source = np.random.default_rng(1)
    old, new = (make_plan(source.zipf(1.3, (4, 24)), range(20), 6, 2) for _ in range(2))
    least = migration(old, map_plan(old, new)).between_nodes
    random = [fetched(old, new, list(range(20)), tuple(source.permutation(20).tolist())) for _ in range(1000)]
    assert least < min(random)


def test_larger_records_count_more():
    """Two layers that disagree about the best exchange: the layer with the larger records decides."""
    old = Plan((make_plan([[1, 1]], [0, 1], 1, 1).layers[0], make_plan([[1, 1]], [0, 1], 1, 1).layers[0]), (0, 1))
    straight, crossed = old.layers[0], type(old.layers[0])(2, old.layers[0].slots[::-1])
    new = Plan((straight, crossed), (0, 1))
    assert map_plan(old, new, record_bytes=[2, 1]).layers[0] == straight
    assert map_plan(old, new, record_bytes=[1, 2]).layers[1] == straight


def test_only_alike_nodes_are_exchanged():
    source = np.random.default_rng(2)
    slots, racks = [3, 3, 5, 5, 3, 3], dict(enumerate("aabbcc"))
    for _ in range(20):
        old, new = (make_plan(source.zipf(1.5, (2, 6)), range(6), slots, 2, domains=racks) for _ in range(2))
        mapped = map_plan(old, new, slots_per_rank=slots, domains=racks)
        assert all(len(row) <= room for layer in mapped.layers for row, room in zip(layer.slots, slots, strict=True))
        assert survival_curve(mapped, domains=racks) == survival_curve(new, domains=racks)
        least = min(
            fetched(old, new, list(range(6)), takes)
            for takes in permutations(range(6))
            if all(slots[node] == slots[part] for node, part in enumerate(takes))
            and all((racks[a] == racks[b]) == (racks[takes[a]] == racks[takes[b]]) for a in range(6) for b in range(6))
        )
        assert migration(old, mapped).between_nodes == least


@settings(max_examples=80, deadline=None)
@given(changes(most_nodes=8))
def test_transfers_lead_to_the_plan_from_shared_sources(change):
    old, new, previous, slots = change
    mapped = map_plan(old, new, previous_ranks=previous, slots_per_rank=slots)
    work = migration(old, mapped, previous_ranks=previous)
    ranks = previous or list(range(new.world_size))
    node_of = new.rank_nodes
    arrivals = np.zeros((2, new.world_size), dtype=int)
    sent = [0] * new.world_size
    for move in work.transfers:
        sent[move.source] += move.source != move.target
    state = [[() if rank is None else before.slots[rank] for rank in ranks] for before in old.layers]
    result = [
        [
            [had[s] if s < len(had) else None for s in range(len(row))]
            for had, row in zip(rows, layer.slots, strict=True)
        ]
        for rows, layer in zip(state, mapped.layers, strict=True)
    ]
    for layer, expert, source, source_slot, target, target_slot in work.transfers:
        rows = state[layer]
        assert rows[source][source_slot] == expert
        assert result[layer][target][target_slot] != expert
        result[layer][target][target_slot] = expert
        arrivals[layer, target] += 1
        holders = [rank for rank, row in enumerate(rows) if expert in row]
        if target in holders:
            assert source == target
            continue
        near = [rank for rank in holders if node_of[rank] == node_of[target]]
        assert source in (near or holders)
        # Balanced within one record: nobody else who could have sent it sends two less.
        assert all(sent[source] <= sent[rank] + 1 for rank in near or holders)
    for layer, expert, target, target_slot in work.missing:
        assert not any(expert in row for row in state[layer])
        result[layer][target][target_slot] = expert
        arrivals[layer, target] += 1
    assert [[tuple(row) for row in rows] for rows in result] == [list(layer.slots) for layer in mapped.layers]
    assert work.staging.tolist() == arrivals.max(axis=0).tolist()


def test_large_migrations_share_the_work():
    """Rebalancing 32 nodes of 4 ranks: no source could pass a record on to a less loaded rank."""
    source = np.random.default_rng(3)
    rank_nodes = [node for node in range(32) for _ in range(4)]
    old, new = (make_plan(source.zipf(1.3, (6, 64)), rank_nodes, 4, 2) for _ in range(2))
    mapped = map_plan(old, new)
    moves = migration(old, mapped).moves
    sent = np.bincount(moves[moves[:, 2] != moves[:, 4], 2], minlength=128)
    for layer, expert, giver, _, target, _ in moves.tolist():
        if giver != target:
            holders = old.layers[layer].holders(expert)
            near = [rank for rank in holders if rank_nodes[rank] == rank_nodes[target]]
            assert all(sent[giver] <= sent[rank] + 1 for rank in near or holders)


def test_nothing_moves_where_nothing_changed():
    plan = make_plan(np.arange(12).reshape(2, 6), range(5), 4, 2)
    assert map_plan(plan, plan) == plan
    work = migration(plan, plan)
    assert work.transfers == ()
    assert work.staging.max() == 0


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda a, b: map_plan(a, b), "previous_ranks is None; it must say which of current's 2 ranks"),
        (lambda a, b: map_plan(a, b, previous_ranks=[0, 1]), "previous_ranks has 2 entries; it must have 3"),
        (lambda a, b: map_plan(a, b, previous_ranks=[0, 2, None]), r"previous_ranks\[1\] is 2; .* from 0 to 1"),
        (lambda a, b: migration(a, b, previous_ranks=[0, 0, None]), "at most one of plan's"),
        (lambda a, b: map_plan(a, make_plan([[1]], [0], 1, 1)), r"plan has layers of \[1\] experts"),
        (lambda a, b: map_plan(b, b, slots_per_rank=[1, 1]), "slots_per_rank has 2 entries"),
        (lambda a, b: map_plan(b, b, record_bytes=0), "record_bytes is 0"),
        (lambda a, b: map_plan(b, b, domains={0: "a"}), r"domains has no entry for nodes \[1, 2\]"),
    ],
)
def test_bad_input_is_named_with_the_legal_range(call, says):
    small, large = make_plan([[1, 1]], [0, 1], 2, 1), make_plan([[1, 1]], [0, 1, 2], 2, 1)
    with pytest.raises(ValueError, match=says):
        call(small, large)
