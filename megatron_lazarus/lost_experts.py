"""Experts that no member holds any more are taken from the newest checkpoint; what they lose by it is counted."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from megatron_lazarus.checkpoint.engine import ExpertCheckpoint
from megatron_lazarus.expert_state import ExpertsLost, ExpertState
from megatron_lazarus.json_exchange import gather_json

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
