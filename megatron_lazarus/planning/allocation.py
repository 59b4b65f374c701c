"""How many replicas each expert gets, from the tokens it receives (Lazarus, arXiv 2407.04656, eq. 1)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from megatron_lazarus.planning.checks import FloatArray, IntArray, enough_slots, integer, slot_counts, token_loads


def allocate_replicas(
    loads: npt.ArrayLike,
    nodes: int,
    slots: int | Sequence[int],
    min_replicas: int,
    ranks: int | None = None,
) -> IntArray:
    """Replicas of every expert, of the shape of ``loads``: [experts], or [layers, experts] for independent layers.

    ``loads`` are tokens per expert, in any unit; a layer of zeros counts as evenly loaded. ``slots`` is per node: one
    number, or one for each node. ``ranks`` (default: one a node) is where replicas can sit apart.

    Lazarus eq. 1, experts in ascending order of load, ties by expert id: each takes its share, rounded down, of the
    slots its predecessors left, and at least ``min_replicas``. Two bounds are added to the paper's rule:

    * No expert gets more replicas than there are ranks: a second replica on one rank protects and balances nothing.
      What this frees goes to the other experts by the same rule, and stays empty only if all of them are at the bound.
    * Where the slots cannot hold ``min_replicas`` of every expert on distinct nodes, the most loaded experts keep the
      minimum and the others get what ``guaranteed_replicas`` leaves, at least one. The paper drops the minimum there.

    Raises ValueError for negative or non-finite loads, fewer slots than experts, and ``min_replicas`` outside 1..nodes.
    """
    array = token_loads(loads)
    nodes = integer("nodes", nodes, 1)
    node_slots = slot_counts("slots", slots, nodes, "node")
    ranks = nodes if ranks is None else integer("ranks", ranks, nodes)
    table = np.atleast_2d(array)
    experts = table.shape[1]
    promised = guaranteed_replicas(experts, node_slots, min_replicas)[::-1]

    order = np.argsort(table, axis=1, kind="stable")
    if promised[0] < min_replicas:
        counts = np.broadcast_to(promised, table.shape)
    else:
        ascending = np.take_along_axis(table, order, axis=1)
        # A power of two keeps whole numbers exact, and no product in the shares can overflow.
        ascending = np.ldexp(ascending, -np.frexp(ascending[:, -1:])[1])
        counts = _shares(ascending, int(node_slots.sum()), min_replicas, ranks)
    result = np.empty_like(counts)
    np.put_along_axis(result, order, counts, axis=1)
    return result.reshape(array.shape)


def guaranteed_replicas(experts: int, node_slots: IntArray, min_replicas: int) -> IntArray:
    """Replicas on distinct nodes that each expert is promised, most valuable expert first, shape [experts].

    ``min_replicas`` for every one where the slots allow it. Otherwise as many experts as possible, from the front, get
    ``min_replicas``, the next ones what is left, and the last ones a single replica. A vector of numbers of distinct
    nodes can be placed exactly when, for every j, its j largest entries sum to at most the sum over nodes of
    min(slots, j) (Gale 1957, Ryser 1957): the rule spends that slack from the front.
    Raises ValueError for fewer slots than experts and for ``min_replicas`` outside 1..number of nodes.
    """
    enough_slots("slots", int(node_slots.sum()), experts)
    min_replicas = integer("min_replicas", min_replicas, 1, len(node_slots))
    if int(np.minimum(node_slots, experts).sum()) >= min_replicas * experts:
        return np.full(experts, min_replicas, dtype=np.int64)
    first = np.arange(1, experts + 1)
    slack = np.minimum(node_slots[None, :], first[:, None]).sum(axis=1) - first
    promised = np.ones(experts, dtype=np.int64)
    extra = min_replicas - 1
    for expert in range(experts):
        extra = min(extra, int(slack[expert:].min()))
        promised[expert] += extra
        slack[expert:] -= extra
    return promised


def _shares(ascending: FloatArray, slots: int, least: int, most: int) -> IntArray:
    """Eq. 1 for each row of loads in ascending order, every entry within [least, most]; slots >= least * experts."""
    layers, experts = ascending.shape
    position = np.arange(experts)
    counts = np.full((layers, experts), most, dtype=np.int64)
    below = np.full(layers, experts)
    while True:
        loads = np.where(position < below[:, None], ascending, 0.0)
        idle = loads.max(axis=1) == 0
        loads[idle] = position < below[idle, None]
        tails = np.cumsum(loads[:, ::-1], axis=1)[:, ::-1]
        left = slots - most * (experts - below)
        for expert in range(int(below.max())):
            live = expert < below
            share = np.floor(loads[:, expert] * left / np.where(live, tails[:, expert], 1.0)).astype(np.int64)
            share = np.where(expert == below - 1, left, np.maximum(share, least))
            counts[:, expert] = np.where(live, share, counts[:, expert])
            left = np.where(live, left - share, left)
        over = (counts > most).sum(axis=1)
        if not over.any():
            return counts
        below = below - over
        counts = np.minimum(counts, most)
