"""From token loads to a whole plan: allocation, placement over failure units, nodes and ranks, all layers aligned."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from megatron_lazarus.planning.allocation import allocate_replicas, guaranteed_replicas
from megatron_lazarus.planning.checks import (
    FloatArray,
    IntArray,
    by_node,
    first_seen_order,
    integer,
    node_weights,
    slot_counts,
    token_loads,
)
from megatron_lazarus.planning.dealing import mend, seats, spread
from megatron_lazarus.planning.placement import NodePlacer
from megatron_lazarus.planning.plan import Placement, Plan


def make_plan(
    loads: npt.ArrayLike,
    rank_nodes: Sequence[int],
    slots_per_rank: int | Sequence[int],
    min_replicas: int,
    *,
    domains: Mapping[int, Hashable] | None = None,
    weights: Mapping[int, float] | None = None,
    max_imbalance: float | None = None,
) -> Plan:
    """The plan for these loads: replicas by ``allocate_replicas``, on nodes by ``NodePlacer``, dealt over their ranks.

    ``loads`` [layers, experts] in tokens; ``rank_nodes[rank]`` is any number that names the rank's node;
    ``slots_per_rank`` one number, or one for each rank. ``domains`` labels every node with what it fails together with
    (rack, switch, zone); ``weights`` are the odds with which nodes fail. Both are per node and optional.
    ``max_imbalance``: where the busiest node would have more than so many times the mean's tokens, load comes before
    survival of ``min_replicas`` and more losses; None: survival comes first.

    Every expert is on at least min(min_replicas, its replicas) distinct nodes, and with ``domains`` on as many distinct
    domains as their slots allow, the most loaded experts first.
    Raises ValueError for bad loads, an empty world, fewer slots than experts, ``min_replicas`` outside 1..nodes,
    ``max_imbalance`` below 1, and domains or weights of unknown or missing nodes.
    """
    table = token_loads(loads, (2,))
    nodes, node_of = node_positions(rank_nodes)
    rank_slots = slot_counts("slots_per_rank", slots_per_rank, len(node_of), "rank")
    node_slots = np.bincount(node_of, weights=rank_slots).astype(np.int64)
    node_ranks = np.bincount(node_of)
    min_replicas = integer("min_replicas", min_replicas, 1, len(nodes))
    if max_imbalance is not None and not max_imbalance >= 1:
        raise ValueError(f"max_imbalance is {max_imbalance}; it must be at least 1, or None")
    odds = None if weights is None else node_weights("weights", by_node("weights", weights, nodes))
    labels = None if domains is None else first_seen_order(by_node("domains", domains, nodes))

    replicas = allocate_replicas(table, len(nodes), node_slots.tolist(), min_replicas, ranks=len(node_of))
    load = table / replicas
    if labels is None:
        layers = NodePlacer(node_slots, min_replicas, odds, node_ranks, max_imbalance).place_layers(replicas, load)
    else:
        layers = _in_domains(replicas, load, node_slots, node_ranks, min_replicas, labels, odds, max_imbalance)
    seating = _seating(node_of, rank_slots)
    placements = [
        _over_ranks(counts, tokens, seating, len(node_of)) for counts, tokens in zip(layers, load, strict=True)
    ]
    return Plan(tuple(placements), tuple(int(node) for node in rank_nodes))


def rank_loads(plan: Plan, loads: npt.ArrayLike) -> FloatArray:
    """Expected tokens of each rank, shape [layers, ranks], if every replica takes an equal part of its expert's tokens.

    ``loads`` [layers, experts]. Raises ValueError if it does not fit the plan.
    """
    table = token_loads(loads, (2,))
    shape = (len(plan.layers), plan.layers[0].num_experts)
    if table.shape != shape:
        raise ValueError(f"loads has shape {table.shape}; for this plan it must be {shape}")
    counts = [layer.replica_counts() for layer in plan.layers]
    return np.stack([(row / held.sum(axis=1)) @ held for row, held in zip(table, counts, strict=True)])


def balance(plan: Plan, loads: npt.ArrayLike) -> FloatArray:
    """Largest over mean expected load of a rank in each layer (1 is even, and so is a layer without load), [layers]."""
    tokens = rank_loads(plan, loads)
    mean = tokens.mean(axis=1)
    return np.where(mean > 0, tokens.max(axis=1) / np.where(mean > 0, mean, 1), 1.0)


def node_positions(rank_nodes: Sequence[int]) -> tuple[list[int], IntArray]:
    """The nodes in ascending order, and for each rank the position of its node. Raises ValueError if there is none."""
    if len(rank_nodes) == 0:
        raise ValueError("rank_nodes is empty; a world has at least 1 rank")
    labels = [integer(f"rank_nodes[{rank}]", node, 0) for rank, node in enumerate(rank_nodes)]
    nodes, node_of = np.unique(labels, return_inverse=True)
    return nodes.tolist(), node_of.astype(np.int64)


def _in_domains(
    replicas: IntArray,
    load: FloatArray,
    node_slots: IntArray,
    node_ranks: IntArray,
    min_replicas: int,
    domain_of: IntArray,
    odds: FloatArray | None,
    max_imbalance: float | None,
) -> list[IntArray]:
    """Node counts of every layer: placed over domains first, then spread over each domain's nodes."""
    domain_slots = np.bincount(domain_of, weights=node_slots).astype(np.int64)
    domain_ranks = np.bincount(domain_of, weights=node_ranks).astype(np.int64)
    domain_odds = None if odds is None else np.bincount(domain_of, weights=odds) / np.bincount(domain_of)
    promises = guaranteed_replicas(replicas.shape[1], domain_slots, min(min_replicas, len(domain_slots)))
    placer = NodePlacer(domain_slots, promises[::-1], domain_odds, domain_ranks, max_imbalance)
    placed = placer.place_layers(replicas, load)
    result = []
    for layer, by_domain in enumerate(placed):
        order = np.lexsort((load[layer], replicas[layer]))
        promised = np.minimum(replicas[layer], min_replicas)
        counts = np.zeros((len(by_domain), len(node_slots)), dtype=np.int64)
        for domain in range(len(domain_slots)):
            members = np.flatnonzero(domain_of == domain)
            here = by_domain[order, domain]
            ascending = order[np.argsort(here, kind="stable")]
            here = by_domain[ascending, domain]
            apart = np.minimum(here, len(members))
            counts[np.ix_(ascending, members)] = spread(here, node_slots[members], apart, load[layer, ascending])
        counts = mend(counts, promised, node_slots)
        if ((counts > 0).sum(axis=1) < promised).any():
            counts = NodePlacer(node_slots, min_replicas, odds, node_ranks).place(replicas[layer], load[layer])
        result.append(counts)
    return result


def _seating(node_of: IntArray, rank_slots: IntArray) -> list[IntArray]:
    """For each node the rank of its first, second, … heaviest replica."""
    members = [np.flatnonzero(node_of == node) for node in range(int(node_of.max()) + 1)]
    return [ranks[seats(rank_slots[ranks])] for ranks in members]


def _over_ranks(counts: IntArray, load: FloatArray, seating: list[IntArray], world_size: int) -> Placement:
    """One layer's node counts [experts, nodes] dealt over each node's ranks, heaviest replica first."""
    order = np.argsort(-load, kind="stable")
    by_node = counts[order].T
    node, position = np.nonzero(by_node)
    items = np.repeat(order[position], by_node[node, position])
    ranks = np.concatenate([seat[:held] for seat, held in zip(seating, by_node.sum(axis=1), strict=True)])
    by_rank = items[np.argsort(ranks, kind="stable")].tolist()
    ends = np.cumsum(np.bincount(ranks, minlength=world_size)).tolist()
    slots = [tuple(by_rank[start:end]) for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    return Placement(len(load), tuple(slots))
