"""What local search leaves behind: a placement that no exchange of two replicas improves."""

from __future__ import annotations

from itertools import combinations, product

import numpy as np
import pytest

from megatron_lazarus.planning.local_search import search
from megatron_lazarus.planning.losses import loss_space


def weighed(counts: np.ndarray, odds: np.ndarray) -> list[float]:
    """Weight of the killing losses of 0, 1, … nodes, tried one by one."""
    nodes = counts.shape[1]
    result = []
    for size in range(nodes + 1):
        losses = [list(lost) for lost in combinations(range(nodes), size)]
        result.append(sum(odds[lost].prod() for lost in losses if (np.delete(counts, lost, axis=1) == 0).all(1).any()))
    return result


def exchanges(counts: np.ndarray):
    for (one, here), (two, there) in product(np.argwhere(counts).tolist(), repeat=2):
        if one < two and here != there:
            other = counts.copy()
            other[one, here] -= 1
            other[one, there] += 1
            other[two, there] -= 1
            other[two, here] += 1
            yield other


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_no_exchange_improves_the_result(seed: int, weighted: bool) -> None:
    source = np.random.default_rng(seed)
    nodes, slots, experts = 6, 3, 5
    odds = source.choice([1.0, 2.0, 5.0], nodes) if weighted else np.ones(nodes)
    start = np.zeros((experts, nodes), dtype=np.int64)
    # Two distinct nodes each, the rest at random.
    items = [*np.repeat(np.arange(experts), 2), *source.integers(0, experts, nodes * slots - 2 * experts)]
    for place, expert in enumerate(items):
        start[expert, place % nodes] += 1
    promised = np.full(experts, 2)
    space = loss_space(nodes, tuple(odds.tolist()) if weighted else None)
    found = search([start], promised, space, shakes=0)
    assert found.sum(axis=1).tolist() == start.sum(axis=1).tolist()
    assert found.sum(axis=0).tolist() == start.sum(axis=0).tolist()
    best = weighed(found, odds)
    assert best <= weighed(start, odds)
    for other in exchanges(found):
        if ((other > 0).sum(axis=1) >= 2).all():
            loss = weighed(other, odds)
            first = next((size for size in range(nodes + 1) if not np.isclose(loss[size], best[size])), None)
            assert first is None or loss[first] > best[first], (found, other)
