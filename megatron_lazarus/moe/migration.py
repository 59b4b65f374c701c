"""Moves records between ranks, to get one layer from a placement to the next."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_lazarus.moe.communication import Communicator
from megatron_lazarus.moe.records import RecordBuffer

Move = tuple[int, int, int, int]
"""(source rank, its old slot, target rank, its new slot)."""


def migrate(
    old: RecordBuffer, experts: Sequence[int], moves: Sequence[Move], rank: int, world_size: int, peers: Communicator
) -> RecordBuffer:
    """The buffer of one layer for ``experts`` (this rank's slots from now on), filled from ``old`` and from peers.

    A slot that no move fills keeps its record, which must be the same expert's. All ranks pass the same ``moves`` in
    the same order. Extra memory: the layer's new buffer, beside the old one until the caller lets go of it, and of what
    travels at most one record to and one from each rank at a time.
    """
    new = RecordBuffer(old.layout, experts, old.rows.device)
    filled = {slot for _, _, target, slot in moves if target == rank}
    for slot, expert in enumerate(new.experts):
        if slot not in filled:
            if slot >= len(old.experts) or old.experts[slot] != expert:
                raise ValueError(f"slot {slot} of rank {rank} is to hold expert {expert}, and no move brings it")
            new.rows[slot].copy_(old.rows[slot])
    for source, source_slot, target, target_slot in moves:
        if source == target == rank:
            new.rows[target_slot].copy_(old.rows[source_slot])
    for bundle in _rounds(moves):
        # One all-to-all rather than messages: waiting for it can be given up when a rank fails.
        sends = sorted((target, slot) for source, slot, target, _ in bundle if source == rank)
        arrivals = sorted((source, slot) for source, _, target, slot in bundle if target == rank)
        going = old.rows[[slot for _, slot in sends]]
        came = peers.all_to_all(going, _once(sends, world_size), _once(arrivals, world_size))
        new.rows[[slot for _, slot in arrivals]] = came
    return new


def _once(exchanges: Sequence[tuple[int, int]], world_size: int) -> list[int]:
    """1 for each rank that is in ``exchanges`` (rank, slot), 0 for the others."""
    ranks = {rank for rank, _ in exchanges}
    return [int(rank in ranks) for rank in range(world_size)]


def _rounds(moves: Sequence[Move]) -> list[list[Move]]:
    """The moves between ranks, in bundles with at most one from each rank to each other one: so little is staged."""
    bundles: list[list[Move]] = []
    seen: dict[tuple[int, int], int] = {}
    for move in moves:
        pair = move[0], move[2]
        if pair[0] != pair[1]:
            number = seen[pair] = seen.get(pair, -1) + 1
            if number == len(bundles):
                bundles.append([])
            bundles[number].append(move)
    return bundles
