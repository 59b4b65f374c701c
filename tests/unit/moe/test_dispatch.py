"""The integer split of tokens over replicas, against its definition."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lazarus.moe.dispatch import piece_order, plan_dispatch, replica_quotas

Case = tuple[np.ndarray, np.ndarray, np.ndarray]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """(tokens [experts, ranks], replicas [experts, ranks] with at least one each, rank_nodes [ranks])."""
    world, experts = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    source = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    tokens = source.integers(0, draw(st.sampled_from([1, 3, 40])) + 1, (experts, world))
    replicas = source.integers(0, 3, (experts, world))
    replicas[np.arange(experts), source.integers(0, world, experts)] += 1
    return tokens, replicas, source.integers(0, 3, world)


@given(cases())
@settings(max_examples=400, deadline=None)
def test_split(case: Case) -> None:
    tokens, replicas, nodes = case
    experts, world = tokens.shape
    plans = [plan_dispatch(tokens, replicas, rank, nodes) for rank in range(world)]
    send = np.stack([plan.send for plan in plans])
    receive = np.stack([plan.receive for plan in plans])
    assert (send >= 0).all()
    assert (send == receive.transpose(1, 0, 2)).all(), "what i sends to j is what j expects of i"
    assert (tokens == send.sum(1).T).all(), "every token goes somewhere"
    quota = send.sum(0).T
    share = tokens.sum(1) // replicas.sum(1)
    assert (quota >= share[:, None] * replicas).all()
    assert (quota <= (share + 1)[:, None] * replicas).all(), "no replica is more than a token above its share"
    for expert in range(experts):
        kept = np.minimum(tokens[expert], quota[expert])
        assert (np.diag(send[:, :, expert]) == kept).all(), "tokens stay on their rank where the quota allows"
        for node in set(nodes):
            inside = nodes == node
            moved = send[np.ix_(inside, inside)][:, :, expert].sum() - kept[inside].sum()
            possible = min((tokens[expert] - kept)[inside].sum(), (quota[expert] - kept)[inside].sum())
            assert moved == possible, "then on their node"


def test_worked_example() -> None:
    """Two experts on three ranks; expert 0 has replicas on ranks 0 and 2, expert 1 on rank 1."""
    tokens = np.array([[5, 2, 0], [1, 1, 1]])
    replicas = np.array([[1, 0, 1], [0, 1, 0]])
    # 7 tokens over two replicas: 4 and 3. Rank 0 keeps four of its five and sends the fifth on.
    assert replica_quotas(tokens.sum(1), replicas).tolist() == [[4, 0, 3], [0, 3, 0]]
    plan = plan_dispatch(tokens, replicas, 0, np.arange(3))
    assert plan.send.tolist() == [[4, 0], [0, 1], [1, 0]]
    assert plan_dispatch(tokens, replicas, 2, np.arange(3)).receive.tolist() == [[1, 0], [2, 0], [0, 0]]


@pytest.mark.parametrize("seed", range(5))
def test_remainders_are_spread_over_ranks(seed: int) -> None:
    """One token left over per expert must not all fall to the first rank."""
    replicas = np.ones((8, 4), dtype=np.int64)
    quota = replica_quotas(np.full(8, 9), replicas)
    assert quota.sum(0).tolist() == [18, 18, 18, 18]


def test_piece_order() -> None:
    # Stored by row: a a | b / c | d d d  ->  by column: a a c | b d d d
    assert piece_order(np.array([[2, 1], [1, 3]])).tolist() == [0, 1, 3, 2, 4, 5, 6]
