"""Brute force over every placement of small settings; prints the table of optima that the planner is compared with.

    python tests/unit/planning/make_optima.py > tests/unit/planning/data/optima.txt

A line is ``nodes slots min_replicas replicas best first``: replicas in ascending order, and for 1, 2, … lost nodes the
least number of killing losses that any placement reaches (``best``, each k for itself) and that of the
lexicographically best placement (``first``). Uses nothing of the planner.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import permutations

SETTINGS = [(nodes, slots) for nodes in range(1, 6) for slots in range(1, 4)] + [(6, 2)]
MAX_EXPERTS = 6


def partitions(total: int, parts: int, least: int = 1) -> Iterator[tuple[int, ...]]:
    """Ascending tuples of ``parts`` numbers from ``least`` up that sum to ``total``."""
    if parts == 1:
        if total >= least:
            yield (total,)
        return
    for head in range(least, total // parts + 1):
        for tail in partitions(total - head, parts - 1, head):
            yield (head, *tail)


def distributions(replicas: int, free: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Every way to put ``replicas`` into the free slots of the nodes."""
    if len(free) == 1:
        if replicas <= free[0]:
            yield (replicas,)
        return
    for here in range(min(replicas, free[0]) + 1):
        for rest in distributions(replicas - here, free[1:]):
            yield (here, *rest)


def killers(nodes: int) -> dict[int, int]:
    """For every set of holders (bit mask): the losses that contain it, one bit for each of the 2^nodes losses."""
    losses = range(1 << nodes)
    return {holders: sum(1 << loss for loss in losses if loss & holders == holders) for holders in losses}


def optima(nodes: int, slots: int, minimum: int, replicas: tuple[int, ...]) -> tuple[list[int], list[int]]:
    killed_by = killers(nodes)
    # After some experts: free slots -> killed losses of the placements, none of which kills all that another one kills.
    reached: dict[tuple[int, ...], set[int]] = {(slots,) * nodes: {0}}
    for index, count in enumerate(replicas):
        following: dict[tuple[int, ...], set[int]] = {}
        for free, families in reached.items():
            for held in distributions(count, free):
                if index == 0 and list(held) != sorted(held):
                    continue
                holders = sum(1 << node for node, here in enumerate(held) if here)
                if holders.bit_count() < min(minimum, count, nodes):
                    continue
                left = tuple(have - here for have, here in zip(free, held, strict=True))
                following.setdefault(left, set()).update(family | killed_by[holders] for family in families)
        reached = merge({free: undominated(families) for free, families in following.items()}, nodes)
    by_size = [sum(1 << loss for loss in range(1 << nodes) if loss.bit_count() == lost) for lost in range(nodes + 1)]
    vectors = [
        tuple((family & layer).bit_count() for layer in by_size[1:])
        for families in reached.values()
        for family in families
    ]
    return [min(column) for column in zip(*vectors, strict=True)], list(min(vectors))


def undominated(families: set[int]) -> set[int]:
    kept: list[int] = []
    for family in sorted(families, key=int.bit_count):
        if not any(other & family == other for other in kept):
            kept.append(family)
    return set(kept)


def merge(reached: dict[tuple[int, ...], set[int]], nodes: int) -> dict[tuple[int, ...], set[int]]:
    """Rename nodes so that free slots ascend: settings that differ in the nodes' names only are one."""
    merged: dict[tuple[int, ...], set[int]] = {}
    for free, families in reached.items():
        order = sorted(range(nodes), key=lambda node: free[node])
        renamed = [sum((loss >> node & 1) << place for place, node in enumerate(order)) for loss in range(1 << nodes)]
        target = merged.setdefault(tuple(sorted(free)), set())
        for family in families:
            target.add(sum(1 << renamed[loss] for loss in range(1 << nodes) if family >> loss & 1))
    return {free: undominated(canonical(families, free, nodes)) for free, families in merged.items()}


def canonical(families: set[int], free: tuple[int, ...], nodes: int) -> set[int]:
    """One family of those that differ by an exchange of nodes with equal free slots."""
    orders = [
        order for order in permutations(range(nodes)) if all(free[a] == b for a, b in zip(order, free, strict=True))
    ]
    renamings = [
        [sum((loss >> node & 1) << place for place, node in enumerate(order)) for loss in range(1 << nodes)]
        for order in orders
    ]
    kept: set[int] = set()
    seen: set[int] = set()
    for family in families:
        if family not in seen:
            members = [loss for loss in range(1 << nodes) if family >> loss & 1]
            seen.update(sum(1 << renaming[loss] for loss in members) for renaming in renamings)
            kept.add(family)
    return kept


def main() -> None:
    for nodes, slots in SETTINGS:
        for experts in range(1, min(MAX_EXPERTS, nodes * slots) + 1):
            for replicas in partitions(nodes * slots, experts):
                for minimum in range(1, min(3, nodes) + 1):
                    best, first = optima(nodes, slots, minimum, replicas)
                    print(nodes, slots, minimum, *(",".join(map(str, row)) for row in (replicas, best, first)))
        print(nodes, slots, file=sys.stderr)


if __name__ == "__main__":
    main()
