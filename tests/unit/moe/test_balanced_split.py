"""The balanced split against linear programs, equal quotas, and brute force."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from scipy.optimize import linprog

from megatron_lazarus.moe.balanced_split import balanced_quotas
from megatron_lazarus.moe.dispatch import plan_dispatch, replica_quotas


def random_case(source: np.random.Generator, most: int = 12) -> tuple[np.ndarray, np.ndarray]:
    experts, ranks = int(source.integers(1, most)), int(source.integers(1, most))
    replicas = source.choice([0, 1, 2], (experts, ranks), p=[0.6, 0.35, 0.05])
    replicas[np.arange(experts), source.integers(0, ranks, experts)] += 1
    tokens = np.floor(source.pareto(1.0, experts) * source.choice([0, 3, 50, 1000])).clip(0, 10**6)
    return tokens.astype(np.int64), replicas


def least_maximum(tokens: np.ndarray, replicas: np.ndarray) -> float:
    """Optimum of the linear program: fractions of tokens may go anywhere the expert is."""
    cells = np.argwhere(replicas > 0)
    experts, ranks = replicas.shape
    equal, below = np.zeros((experts, len(cells) + 1)), np.zeros((ranks, len(cells) + 1))
    for index, (expert, rank) in enumerate(cells):
        equal[expert, index] = below[rank, index] = 1
    below[:, -1] = -1
    cost = np.zeros(len(cells) + 1)
    cost[-1] = 1
    result = linprog(cost, A_ub=below, b_ub=np.zeros(ranks), A_eq=equal, b_eq=tokens, method="highs")
    assert result.status == 0
    return float(result.fun)


def test_is_a_split_and_never_worse_than_equal_quotas():
    source = np.random.default_rng(0)
    better = 0
    for _ in range(10_000):
        tokens, replicas = random_case(source)
        quotas, equal = balanced_quotas(tokens, replicas), replica_quotas(tokens, replicas)
        assert (quotas >= 0).all()
        assert (quotas[replicas == 0] == 0).all()
        assert quotas.sum(axis=1).tolist() == tokens.tolist()
        assert quotas.sum(axis=0).max() <= equal.sum(axis=0).max()
        better += quotas.sum(axis=0).max() < equal.sum(axis=0).max()
    assert better > 3000


def test_equals_the_optimum_of_the_linear_program():
    source = np.random.default_rng(1)
    for _ in range(400):
        tokens, replicas = random_case(source)
        optimum = least_maximum(tokens, replicas)
        found = balanced_quotas(tokens, replicas).sum(axis=0).max()
        # Whole tokens: the next whole number, and not one more.
        assert optimum - 1e-6 * max(1, optimum) <= found < optimum + 1


def test_equals_brute_force_on_whole_tokens():
    source = np.random.default_rng(2)
    for _ in range(200):
        tokens, replicas = source.integers(0, 4, 3), source.integers(0, 2, (3, 3))
        replicas[np.arange(3), source.integers(0, 3, 3)] = 1
        splits = [
            [
                split
                for split in product(range(count + 1), repeat=3)
                if sum(split) == count and all(held or not part for part, held in zip(split, row, strict=True))
            ]
            for count, row in zip(tokens.tolist(), replicas.tolist(), strict=True)
        ]
        best = min(max(map(sum, zip(*choice, strict=True))) for choice in product(*splits))
        assert balanced_quotas(tokens, replicas).sum(axis=0).max() == best


def test_a_dispatch_by_it_brings_every_token_to_its_expert():
    source = np.random.default_rng(3)
    for _ in range(200):
        total, replicas = random_case(source, 8)
        world = replicas.shape[1]
        tokens = np.stack([source.multinomial(int(count), np.ones(world) / world) for count in total])
        nodes = np.sort(source.integers(0, 3, world))
        plans = [plan_dispatch(tokens, replicas, rank, nodes, balanced_quotas) for rank in range(world)]
        for rank, plan in enumerate(plans):
            assert plan.send.sum(axis=0).tolist() == tokens[:, rank].tolist()
            for peer in range(world):
                assert plan.receive[peer].tolist() == plans[peer].send[rank].tolist()
        received = np.stack([plan.receive.sum(axis=0) for plan in plans], axis=1)
        assert (received[replicas == 0] == 0).all()
        assert received.sum(axis=0).max() == balanced_quotas(total, replicas).sum(axis=0).max()


def test_balanced_loads_keep_equal_quotas():
    tokens, replicas = np.array([12, 12, 12]), np.array([[1, 1, 0], [0, 1, 1], [1, 0, 1]])
    assert (balanced_quotas(tokens, replicas) == replica_quotas(tokens, replicas)).all()


def test_an_expert_without_replica_is_refused():
    with pytest.raises(ValueError, match="no replica"):
        balanced_quotas(np.array([3, 1]), np.array([[1, 0], [0, 0]]))
