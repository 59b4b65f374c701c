"""Moves records between ranks, to get one layer from a placement to the next."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_lazarus.moe.communication import Communicator
from megatron_lazarus.moe.records import RecordBuffer

Move = tuple[int, int, int, int]
"""(source rank, its old slot, target rank, its new slot)."""


def migrate(
    old: RecordBuffer, experts: Sequence[int], moves: Sequence[Move], rank: int, world_size: int, peers: Communicator
) -> RecordBuffer:
    """The buffer of one layer for ``experts`` (this rank's slots from now on), filled from ``old`` and from peers.

    A slot that no move fills keeps its record, which must be the same expert's. All ranks pass the same ``moves`` in
    the same order. Extra memory: the layer's new buffer, beside the old one until the caller lets go of it, and a copy
    of what travels.
    """
    new = RecordBuffer(old.layout, experts, old.rows.device)
    filled = {slot for _, _, target, slot in moves if target == rank}
    for slot, expert in enumerate(new.experts):
        if slot not in filled:
            if slot >= len(old.experts) or old.experts[slot] != expert:
                raise ValueError(f"slot {slot} of rank {rank} is to hold expert {expert}, and no move brings it")
            new.rows[slot].copy_(old.rows[slot])
    sends: list[list[torch.Tensor]] = [[] for _ in range(world_size)]
    arrivals: list[list[int]] = [[] for _ in range(world_size)]
    for source, source_slot, target, target_slot in moves:
        if source == target == rank:
            new.rows[target_slot].copy_(old.rows[source_slot])
        elif source == rank:
            sends[target].append(old.rows[source_slot])
        elif target == rank:
            arrivals[source].append(target_slot)
    if any(source != target for source, _, target, _ in moves):
        # One all-to-all rather than messages: waiting for it can be given up when a rank fails.
        outgoing = [row for rows in sends for row in rows]
        stacked = torch.stack(outgoing) if outgoing else old.rows.new_empty(0, old.layout.nbytes)
        came = peers.all_to_all(stacked, [len(rows) for rows in sends], [len(slots) for slots in arrivals])
        new.rows[[slot for slots in arrivals for slot in slots]] = came
    return new
