"""From token loads to a whole plan: allocation, placement over failure units, nodes and ranks, all layers aligned."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from megatron_lazarus.planning.allocation import allocate_replicas
from megatron_lazarus.planning.checks import (
    FloatArray,
    IntArray,
    integer,
    slot_counts,
    token_loads,
)
from megatron_lazarus.planning.dealing import deal
from megatron_lazarus.planning.placement import NodePlacer
from megatron_lazarus.planning.plan import Placement, Plan


def make_plan(
    loads: npt.ArrayLike,
    rank_nodes: Sequence[int],
    slots_per_rank: int | Sequence[int],
    min_replicas: int,
) -> Plan:
    """The plan for these loads: replicas by ``allocate_replicas``, on nodes by ``NodePlacer``, dealt over their ranks.

    ``loads`` [layers, experts] in tokens; ``rank_nodes[rank]`` is any number that names the rank's node;
    ``slots_per_rank`` one number, or one for each rank. Every expert is on at least min(min_replicas, its replicas)
    distinct nodes. Raises ValueError for bad loads, an empty world, fewer slots than experts, and ``min_replicas``
    outside 1..number of nodes.
    """
    table = token_loads(loads, (2,))
    nodes, node_of = _nodes(rank_nodes)
    rank_slots = slot_counts("slots_per_rank", slots_per_rank, len(node_of), "rank")
    node_slots = np.bincount(node_of, weights=rank_slots).astype(np.int64)
    min_replicas = integer("min_replicas", min_replicas, 1, len(nodes))
    replicas = allocate_replicas(table, len(nodes), node_slots.tolist(), min_replicas, ranks=len(node_of))
    load = table / replicas
    layers = NodePlacer(node_slots, min_replicas).place_layers(replicas, load)
    ranks = [np.flatnonzero(node_of == node) for node in range(len(nodes))]
    return Plan(
        tuple(
            _over_ranks(counts, layer_load, ranks, rank_slots) for counts, layer_load in zip(layers, load, strict=True)
        ),
        tuple(int(node) for node in rank_nodes),
    )


def _nodes(rank_nodes: Sequence[int]) -> tuple[list[int], IntArray]:
    """The nodes in ascending order, and the position of each rank's node among them."""
    if len(rank_nodes) == 0:
        raise ValueError("rank_nodes is empty; a world has at least 1 rank")
    labels = [integer(f"rank_nodes[{rank}]", node, 0) for rank, node in enumerate(rank_nodes)]
    nodes, node_of = np.unique(labels, return_inverse=True)
    return nodes.tolist(), node_of.astype(np.int64)


def _over_ranks(counts: IntArray, load: FloatArray, ranks: list[IntArray], rank_slots: IntArray) -> Placement:
    """One layer's node counts [experts, nodes] dealt over each node's ranks, heaviest replica first."""
    order = np.argsort(-load, kind="stable")
    slots: list[tuple[int, ...]] = [()] * len(rank_slots)
    for node, members in enumerate(ranks):
        items = np.repeat(order, counts[order, node])
        for rank, held in zip(members.tolist(), deal(items, rank_slots[members]), strict=True):
            slots[rank] = tuple(held.tolist())
    return Placement(len(load), tuple(slots))
