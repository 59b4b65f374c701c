"""Sharing the micro-batches of a global batch over any number of ranks."""

from __future__ import annotations


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
