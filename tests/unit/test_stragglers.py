"""Which nodes are reported as slow, from the seconds that each rank waits."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_lazarus.stragglers import SLOW_SHARE, Stragglers


def feed(watch: Stragglers, waits: list[float], steps: int, noise: np.random.Generator | None = None):
    found = []
    for _ in range(steps):
        extra = np.zeros(len(waits)) if noise is None else noise.exponential(0.3, len(waits))
        found += watch.update(1.0, np.asarray(waits) + extra)
    return [(one.node, one.slow) for one in found]


def test_one_for_which_the_others_wait_is_reported_once_and_again_when_it_is_over():
    watch = Stragglers([0, 0, 1, 1, 2, 2])
    # Both ranks of node 1 are looked at: one of them waits, for the other.
    assert feed(watch, [0.5, 0.5, 0.5, 0.0, 0.5, 0.5], 200) == [(1, True)]
    assert feed(watch, [0.1] * 6, 200) == [(1, False)]
    assert feed(watch, [0.1, 0.1, 0.6, 0.6, 0.6, 0.6], 200) == [(0, True)]


def test_two_nodes_and_two_slow_ones_of_four():
    assert feed(Stragglers([0, 1]), [0.0, 0.5], 100) == [(0, True)]
    assert sorted(feed(Stragglers([0, 1, 2, 3]), [0.0, 0.5, 0.0, 0.5], 100)) == [(0, True), (2, True)]


def test_noise_and_small_lags_are_not_reported():
    watch = Stragglers([0, 1, 2, 3])
    assert feed(watch, [0.2, 0.2, 0.2, 0.2], 2000, np.random.default_rng(0)) == []
    assert feed(watch, [0.2, 0.2 - 0.9 * SLOW_SHARE, 0.2, 0.2], 500) == []


@pytest.mark.parametrize("steps", [1, 39])
def test_nothing_is_said_before_there_is_enough_to_go_by(steps):
    assert feed(Stragglers([0, 1]), [0.0, 0.9], steps) == []


def test_a_single_node_has_nobody_to_wait_for_it():
    assert feed(Stragglers([0, 0]), [0.0, 0.9], 100) == []
