"""Local search over placements of a few nodes, comparing them by counted losses."""

from __future__ import annotations

import random
from itertools import combinations

import numpy as np

from megatron_lazarus.planning.checks import IntArray
from megatron_lazarus.planning.losses import LossSpace, node_masks


class Search:
    """Exchanges two replicas at a time, downhill in ``LossSpace.loss``, never below the promised distinct nodes."""

    def __init__(self, counts: IntArray, promised: IntArray, space: LossSpace) -> None:
        """``counts`` [experts, nodes], the start, must keep ``promised`` [experts] distinct nodes for each expert."""
        self.space = space
        self.promised = [int(value) for value in promised]
        self.load(counts)

    def load(self, counts: IntArray) -> None:
        """Go on from this placement."""
        self.counts = counts.tolist()
        self.masks = node_masks(counts > 0)
        self.family = self.space.killed(self.masks)
        self.loss = self.space.loss(self.family)

    def descend(self) -> None:
        """Take improving exchanges until there is none left."""
        pairs = list(combinations(range(len(self.counts)), 2))
        at, in_vain = 0, 0
        while in_vain < len(pairs):
            if self._exchange(*pairs[at]):
                in_vain = 0
            else:
                at, in_vain = (at + 1) % len(pairs), in_vain + 1

    def _exchange(self, one: int, two: int) -> bool:
        """Make the first improving exchange of a replica of ``one`` with a replica of ``two``, if there is any."""
        supersets = self.space.supersets
        rest = 0
        for expert, mask in enumerate(self.masks):
            if expert != one and expert != two:
                rest |= supersets[mask]
        if self.family == rest:
            return False
        sources, targets = self._withdrawals(one), self._withdrawals(two)
        for here, left_one in sources:
            for there, left_two in targets:
                if here == there:
                    continue
                mask_one, mask_two = left_one | there, left_two | here
                family = rest | supersets[mask_one] | supersets[mask_two]
                if family & self.family == self.family or not self.space.better(family, self.family, self.loss):
                    continue
                if mask_one.bit_count() < self.promised[one] or mask_two.bit_count() < self.promised[two]:
                    continue
                self._apply(one, two, here.bit_length() - 1, there.bit_length() - 1)
                self.family, self.loss = family, self.space.loss(family)
                return True
        return False

    def _withdrawals(self, expert: int) -> list[tuple[int, int]]:
        """For each node that holds the expert: the node's bit, and the expert's nodes without one replica there."""
        mask = self.masks[expert]
        return [
            (1 << node, mask if count > 1 else mask ^ (1 << node))
            for node, count in enumerate(self.counts[expert])
            if count
        ]

    def _apply(self, one: int, two: int, here: int, there: int) -> None:
        self.masks[one] = _moved(self.masks[one], self.counts[one], here, there)
        self.masks[two] = _moved(self.masks[two], self.counts[two], there, here)
        self.counts[one][here] -= 1
        self.counts[one][there] += 1
        self.counts[two][there] -= 1
        self.counts[two][here] += 1

    def shake(self, source: random.Random, exchanges: int) -> None:
        """Make some legal exchanges at random."""
        cells = [(expert, node) for expert, row in enumerate(self.counts) for node, count in enumerate(row) if count]
        for _ in range(exchanges):
            (one, here), (two, there) = source.sample(cells, 2)
            if one == two or here == there or not self.counts[one][here] or not self.counts[two][there]:
                continue
            mask_one = _moved(self.masks[one], self.counts[one], here, there)
            mask_two = _moved(self.masks[two], self.counts[two], there, here)
            if mask_one.bit_count() >= self.promised[one] and mask_two.bit_count() >= self.promised[two]:
                self._apply(one, two, here, there)
        self.family = self.space.killed(self.masks)
        self.loss = self.space.loss(self.family)


def _moved(mask: int, counts: list[int], source: int, target: int) -> int:
    """The node set after one replica has gone from ``source`` to ``target``."""
    if counts[source] == 1:
        mask &= ~(1 << source)
    return mask | (1 << target)


def search(starts: list[IntArray], promised: IntArray, space: LossSpace, shakes: int) -> IntArray:
    """The best placement found by descending from every start, then ``shakes`` times from a shaken best.

    Deterministic: the shaking draws from a generator of fixed seed. All arrays as in ``Search``.
    """
    source = random.Random(0)
    best: tuple[tuple[float, ...], list[list[int]]] | None = None
    for start in starts:
        walk = Search(start, promised, space)
        walk.descend()
        if best is None or walk.loss < best[0]:
            best = walk.loss, walk.counts
    assert best is not None
    for _ in range(shakes):
        walk = Search(np.array(best[1], dtype=np.int64), promised, space)
        walk.shake(source, 1 + source.randrange(3))
        walk.descend()
        if walk.loss <= best[0]:
            best = walk.loss, walk.counts
    return np.array(best[1], dtype=np.int64)
