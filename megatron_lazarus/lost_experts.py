"""Experts that no member holds any more are taken from the newest checkpoint; what they lose by it is counted."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from megatron_lazarus.checkpoint.engine import ExpertCheckpoint
from megatron_lazarus.elastic.membership import Generation
from megatron_lazarus.expert_state import ExpertsLost, ExpertState, lost_records
from megatron_lazarus.handshake import Report
from megatron_lazarus.json_exchange import gather_json
from megatron_lazarus.planning.plan import Placement, Plan

logger = logging.getLogger(__name__)


def restore_lost(
    experts: ExpertState, checkpoint: ExpertCheckpoint, lost: Sequence[tuple[int, int]], rank: int, world_size: int
) -> None:
    """Each rank adopts a share of the ``lost`` (layer, expert). All ranks call it alike.

    Raises ExpertsLost if the run has no checkpoint.
    """
    names = ", ".join(f"layer {layer} expert {expert}" for layer, expert in lost[:10])
    folder = checkpoint.history.newest
    if folder is None:
        raise ExpertsLost(f"{len(lost)} experts have no replica left, and there is no checkpoint: {names}")
    if rank == 0:
        logger.warning("%d experts have no replica left; taken from %s: %s", len(lost), folder, names)
    mine = []
    for layer, expert in lost[rank::world_size]:
        record, tokens = checkpoint.read_record(folder, layer, expert)
        experts.adopt(layer, record)
        mine.append([layer, expert, tokens])
    restored = [entry for part in gather_json(mine) for entry in part]
    checkpoint.history.lost({(layer, expert): tokens for layer, expert, tokens in restored})


def hold_everything(
    engine: Any, reports: Sequence[Report], report_again: Callable[[], Sequence[Report]], generation: Generation
) -> Plan:
    """See to it that every expert is held by some rank of a new generation; returns who holds what.

    ``reports`` are those of all ranks, before the operation in progress was completed or dropped.
    Raises ExpertsLost as ``restore_lost`` does.
    """
    experts = engine.experts
    counts = [layer.num_experts for layer in experts.layers]
    lost = lost_records({rank: report.holdings for rank, report in enumerate(reports)}, counts)
    fresh = all(not report.operation for report in reports) and engine.global_steps == 0
    if lost and not fresh:
        restore_lost(experts, engine._checkpoint, lost, generation.rank, generation.world_size)
    for layer, expert in lost if fresh else ():
        # Built alike on every rank; of each expert one rank's values count.
        if experts.layers[layer].initial_rank(expert, generation.world_size) == generation.rank:
            layout = experts.buffers[layer].layout
            experts.adopt(layer, experts.layers[layer].experts.initial_record(layout, expert, engine.device))
    if lost:
        reports = report_again()
    rows = [[report.holdings[layer] for report in reports] for layer in range(len(counts))]
    placements = [Placement(count, tuple(held)) for count, held in zip(counts, rows, strict=True)]
    return Plan(tuple(placements), generation.rank_nodes)
