"""Sharing the micro-batches of a global batch over any number of ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

Round = int | None
"""The micro-batch that a rank does in a round; None: it has none left, and only takes part."""


def micro_batches(total: int, world_size: int) -> tuple[range, ...]:
    """Micro-batch numbers of each rank: contiguous shares that differ by at most one, the larger ones first.

    Stable under changes of the world: a number means the same samples whoever runs it, and read in rank order the
    shares are 0, 1, …, total - 1 for every world size. Ranks beyond ``total`` get an empty share.

    Raises ValueError unless ``total`` >= 1 and ``world_size`` >= 1.
    """
    if total < 1:
        raise ValueError(f"total is {total}; a global batch has at least 1 micro-batch")
    if world_size < 1:
        raise ValueError(f"world_size is {world_size}; it must be at least 1")
    base, larger = divmod(total, world_size)
    starts = [rank * base + min(rank, larger) for rank in range(world_size + 1)]
    return tuple(range(starts[rank], starts[rank + 1]) for rank in range(world_size))


def shares_around(total: int, begun: Sequence[Sequence[Round]], least: int = 1) -> tuple[tuple[Round, ...], ...]:
    """The rounds of each rank, equally many, where rank r has already begun with ``begun[r]``.

    Every micro-batch is in one round of one rank; those that nobody has begun are dealt out like ``micro_batches``, in
    as few further rounds as possible, but there are ``least`` rounds in all. Raises ValueError if one is begun twice,
    or is none of 0..``total`` - 1.
    """
    taken = [number for row in begun for number in row if number is not None]
    if len(set(taken)) < len(taken) or not set(taken) <= set(range(total)):
        raise ValueError(f"{taken} are begun; each may be once, and be one of the {total} micro-batches")
    missing = sorted(set(range(total)) - set(taken))
    cells = len(missing) + sum(len(row) for row in begun)
    rounds = max(least, -(-cells // len(begun)), *(len(row) for row in begun))
    free = [(index, rank) for rank, row in enumerate(begun) for index in range(len(row), rounds)]
    fill = Counter(rank for _, rank in sorted(free)[: len(missing)])
    rows: list[tuple[Round, ...]] = []
    dealt = 0
    for rank, row in enumerate(begun):
        share = missing[dealt : dealt + fill[rank]]
        dealt += len(share)
        rows.append((*row, *share, *[None] * (rounds - len(row) - len(share))))
    return tuple(rows)
