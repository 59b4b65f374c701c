"""Replica counts against eq. 1 in exact fractions, and against what the two added bounds promise."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations_with_replacement, product
from math import floor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lazarus.planning.allocation import allocate_replicas, guaranteed_replicas


def equation_1(loads: list[int], slots: int, minimum: int) -> list[int]:
    """The paper's rule, word for word, in exact arithmetic; loads ascending and not all zero."""
    counts: list[int] = []
    for expert, load in enumerate(loads):
        share = Fraction(load, sum(loads[expert:])) * (slots - sum(counts))
        counts.append(max(floor(share), minimum))
    return counts


@given(
    st.lists(st.integers(0, 10**6), min_size=1, max_size=12).map(sorted).filter(lambda loads: loads[-1] > 0),
    st.integers(1, 12),
    st.integers(1, 8),
    st.integers(1, 4),
)
def test_equation_1_where_no_bound_is_met(loads, nodes, slots, minimum):
    minimum = min(minimum, nodes)
    if nodes * slots < minimum * len(loads) or slots > len(loads):
        return
    ranks = nodes * slots
    counts = allocate_replicas(loads, nodes, slots, minimum, ranks)
    assert counts.tolist() == equation_1(loads, nodes * slots, minimum)


@given(
    st.lists(st.integers(0, 1000), min_size=2, max_size=24),
    st.integers(1, 16),
    st.integers(1, 8),
    st.integers(1, 4),
    st.integers(1, 3),
)
def test_sum_minimum_order_and_bound(loads, nodes, slots, minimum, ranks_per_node):
    minimum = min(minimum, nodes)
    if nodes * slots < minimum * len(loads):
        return
    ranks = nodes * ranks_per_node
    counts = allocate_replicas(loads, nodes, slots, minimum, ranks)
    assert counts.sum() == min(nodes * slots, ranks * len(loads))
    assert counts.min() >= minimum
    assert counts.max() <= ranks
    ascending = counts[np.argsort(loads, kind="stable")]
    assert (np.diff(ascending) >= 0).all()


def test_layers_are_independent_and_keep_their_shape():
    loads = np.array([[5, 1, 1, 1], [1, 1, 1, 5], [0, 0, 0, 0]])
    table = allocate_replicas(loads, 4, 3, 2)
    assert table.shape == (3, 4)
    assert [row.tolist() for row in table] == [allocate_replicas(row, 4, 3, 2).tolist() for row in loads]
    assert table[2].tolist() == [3, 3, 3, 3]


def test_what_a_bounded_expert_leaves_goes_to_the_others():
    assert allocate_replicas([1, 1, 1, 997], 4, 3, 1).tolist() == [2, 3, 3, 4]
    assert allocate_replicas([1, 1, 1, 997], 4, 3, 1, ranks=12).tolist() == [1, 1, 1, 9]
    assert allocate_replicas([0, 0, 9], 4, 2, 1).tolist() == [2, 2, 4]
    assert allocate_replicas([3, 4], 5, 6, 1).tolist() == [5, 5]


def test_too_few_slots_keep_the_minimum_of_the_most_loaded():
    # The paper's own case: 5 nodes of 6 slots, 16 experts, f = 2 has 30 of 32 slots and drops the minimum.
    counts = allocate_replicas(np.arange(16), 5, 6, 2)
    assert counts.tolist() == [1, 1] + [2] * 14
    assert allocate_replicas(np.arange(6), 4, 3, 3).tolist() == [1, 1, 1, 3, 3, 3]
    assert allocate_replicas(np.arange(5), 4, 3, 4).tolist() == [1, 1, 2, 4, 4]


def placeable(distinct: tuple[int, ...], slots: tuple[int, ...]) -> bool:
    """Whether every expert can have that many distinct nodes, tried out expert by expert."""
    reached = {slots}
    for count in distinct:
        reached = {
            tuple(free - here for free, here in zip(state, choice, strict=True))
            for state in reached
            for choice in product((0, 1), repeat=len(slots))
            if sum(choice) == count and all(free >= here for free, here in zip(state, choice, strict=True))
        }
    return bool(reached)


def test_promise_is_placeable_and_no_larger_one_is():
    """Uneven nodes: the first experts get as much as any placement could give them, in this order."""
    for slots in combinations_with_replacement(range(1, 5), 3):
        for experts in range(1, min(sum(slots), 5) + 1):
            for minimum in range(1, 4):
                promised = guaranteed_replicas(experts, np.array(slots), minimum).tolist()
                possible = [
                    vector
                    for vector in product(range(1, minimum + 1), repeat=experts)
                    if list(vector) == sorted(vector, reverse=True) and placeable(vector, slots)
                ]
                assert tuple(promised) == max(possible), (slots, experts, minimum)


def test_huge_and_tiny_loads_neither_overflow_nor_vanish():
    assert allocate_replicas([1e308, 1e308], 4, 1, 1).tolist() == [2, 2]
    assert allocate_replicas([1e-300, 3e-300], 8, 1, 1).tolist() == [2, 6]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (([1, -1], 2, 2, 1), r"loads\[1\] is -1.0; .* at least 0"),
        (([[1, float("nan")]], 2, 2, 1), r"loads\[0, 1\] is nan"),
        (([1, float("inf")], 2, 2, 1), r"loads\[1\] is inf"),
        (([], 2, 2, 1), r"loads has shape \(0,\)"),
        (([1, 1, 1], 1, 2, 1), r"slots gives 2 slots for 3 experts; there must be at least 3"),
        (([1, 1], 2, 2, 3), r"min_replicas is 3; it must be an integer from 1 to 2"),
        (([1, 1], 2, 2, 0), r"min_replicas is 0; it must be an integer from 1 to 2"),
        (([1, 1], 0, 2, 1), r"nodes is 0; it must be an integer of at least 1"),
        (([1, 1], 2, 0, 1), r"slots is 0; it must be an integer of at least 1"),
        (([1, 1], 2, [2, 1, 1], 1), r"slots has 3 entries; it must have one for each of the 2 nodes"),
        (([1, 1], 2, 1.5, 1), r"slots is 1.5; it must be an integer"),
        (([1, 1], 2, 2, 1, 1), r"ranks is 1; it must be an integer of at least 2"),
    ],
)
def test_bad_input_is_named_with_the_legal_range(arguments, says):
    with pytest.raises(ValueError, match=says):
        allocate_replicas(*arguments)


@settings(max_examples=50)
@given(st.lists(st.integers(1, 6), min_size=2, max_size=9), st.integers(1, 30), st.integers(1, 5))
def test_uneven_nodes_never_get_more_than_they_can_hold(slots, experts, minimum):
    minimum = min(minimum, len(slots))
    if sum(slots) < experts:
        return
    counts = allocate_replicas(np.arange(experts), len(slots), slots, minimum)
    assert counts.min() >= 1
    assert counts.sum() <= sum(slots)
