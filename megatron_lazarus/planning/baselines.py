"""What a plan is compared with: the paper's own placement as printed, and the two usual ones.

All on ``nodes`` nodes of one rank and ``slots`` slots each, for ``replicas`` of shape [layers, experts] that fit.
"""

from __future__ import annotations

import numpy as np

from megatron_lazarus.planning.checks import IntArray
from megatron_lazarus.planning.dealing import seats
from megatron_lazarus.planning.mro import core, group_nodes, members, paper_groups
from megatron_lazarus.planning.plan import Placement, Plan


def paper_plan(replicas: IntArray, nodes: int, slots: int) -> Plan:
    """Maximum Rank Overlap as printed (arXiv 2407.04656, section 4.1), truncated last groups included.

    Every layer uses the nodes in the same order; vacant slots are dealt in turn.
    """
    layers = []
    for row in replicas:
        order = np.argsort(row, kind="stable")
        groups = paper_groups(row[order], np.full(nodes, slots))
        counts = core(members(groups), group_nodes(groups, np.arange(nodes), groups.nodes), nodes)
        held = np.zeros((len(row), nodes), dtype=np.int64)
        held[order[: len(counts)]] = counts
        rest = np.repeat(order, row[order] - held[order].sum(axis=1))
        np.add.at(held, (rest, seats(slots - held.sum(axis=0))[: len(rest)]), 1)
        layers.append(_placement(held))
    return Plan(tuple(layers), tuple(range(nodes)))


def spread_plan(replicas: IntArray, nodes: int, slots: int) -> Plan:
    """Round-robin: expert after expert to node after node, starting one node further in every layer."""
    layers = []
    for start, row in enumerate(replicas):
        items = np.repeat(np.arange(len(row)), row)
        held = np.zeros((len(row), nodes), dtype=np.int64)
        np.add.at(held, (items, (start + np.arange(len(items))) % nodes), 1)
        layers.append(_placement(held))
    return Plan(tuple(layers), tuple(range(nodes)))


def compact_plan(replicas: IntArray, nodes: int, slots: int) -> Plan:
    """The replicas of expert after expert fill node after node: as few nodes as possible for each expert."""
    layers = []
    for row in replicas:
        items = np.repeat(np.arange(len(row)), row)
        held = np.zeros((len(row), nodes), dtype=np.int64)
        np.add.at(held, (items, np.arange(len(items)) // slots), 1)
        layers.append(_placement(held))
    return Plan(tuple(layers), tuple(range(nodes)))


def _placement(counts: IntArray) -> Placement:
    experts = np.arange(len(counts))
    return Placement(len(counts), tuple(tuple(np.repeat(experts, column).tolist()) for column in counts.T))
