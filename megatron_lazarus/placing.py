"""From loads and configuration to a plan for the ranks of a world."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from megatron_lazarus.config import ExpertsConfig, slots_per_rank
from megatron_lazarus.planning.plan import Placement, Plan
from megatron_lazarus.planning.planner import make_plan

Loads = Sequence[npt.NDArray[np.float64]]
"""Tokens of each expert, one array [experts] per layer."""


def plan_for(loads: Loads, config: ExpertsConfig, rank_nodes: Sequence[int]) -> Plan:
    """Placements of all layers for these loads. Layers of one size are planned together.

    ``rank_nodes`` [ranks] numbers each rank's node. Raises ConfigError if the slots cannot hold every expert once.
    """
    placements: dict[int, Placement] = {}
    sizes = [len(load) for load in loads]
    for num_experts in dict.fromkeys(sizes):
        indices = [index for index, size in enumerate(sizes) if size == num_experts]
        slots = slots_per_rank(config, num_experts, len(rank_nodes))
        replicas = min(config.min_replicas, len(set(rank_nodes)))
        table = np.stack([loads[index] for index in indices])
        plan = make_plan(table, rank_nodes, slots, replicas, max_imbalance=config.max_imbalance)
        placements.update(zip(indices, plan.layers, strict=True))
    return Plan(tuple(placements[index] for index in range(len(sizes))), tuple(rank_nodes))


def spread(plan: Plan, ranks: Sequence[int], rank_nodes: Sequence[int]) -> Plan:
    """``plan``, made for some ``ranks`` of a world, as one for all of it; the other ranks hold nothing."""
    layers = []
    for placement in plan.layers:
        rows: list[tuple[int, ...]] = [()] * len(rank_nodes)
        for rank, row in zip(ranks, placement.slots, strict=True):
            rows[rank] = row
        layers.append(Placement(placement.num_experts, tuple(rows)))
    return Plan(tuple(layers), tuple(rank_nodes))
