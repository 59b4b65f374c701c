"""Who writes what of a checkpoint. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Unit:
    """Something that one rank writes as a whole; ``holders``: the ranks that have it."""

    bytes: int
    holders: Sequence[int]


def share(units: Sequence[Unit], world_size: int) -> list[int]:
    """The rank that writes each unit: always the holder with the least to write so far.

    First come units that few ranks hold, larger ones before smaller ones: what any rank can write (the dense part)
    evens out what the experts' placement left uneven (MoC-System, section 4, adaptive sharding).
    """
    load = [0] * world_size
    writers = [-1] * len(units)
    for index in sorted(range(len(units)), key=lambda i: (len(units[i].holders), -units[i].bytes, i)):
        unit = units[index]
        writer = min(unit.holders, key=lambda rank: (load[rank], rank))
        load[writer] += unit.bytes
        writers[index] = writer
    return writers


def piece_limit(total: int, world_size: int) -> int:
    """Bytes above which a dense tensor is cut: an eighth of a rank's even share, and at least 64 KiB."""
    return max(1 << 16, total // (8 * world_size))
