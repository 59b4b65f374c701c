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
        self._least = min(self.promised)
        self.load(counts)

    def load(self, counts: IntArray) -> None:
        """Go on from this placement."""
        self.counts = counts.tolist()
        self.masks = node_masks(counts > 0)

    def _survey(self) -> None:
        """Find what descending has to know of the placement."""
        supersets = self.space.supersets
        self._families = [supersets[mask] for mask in self.masks]
        self.loss = self.space.loss(self.space.killed(self.masks))
        # For each expert, the others that are lost whenever it is, as bits: they have no other nodes than it has.
        self._lost_before = [
            sum(1 << other for other, less in enumerate(self.masks) if other != expert and less | mask == mask)
            for expert, mask in enumerate(self.masks)
        ]
        # Of nodes that hold the same and fail alike, exchanges with one stand for exchanges with any.
        unlike = list(range(self.space.nodes))
        if self.space.equal:
            columns = list(zip(*self.counts, strict=True))
            unlike = [node for node, column in enumerate(columns) if columns.index(column) == node]
        # For each expert and node that holds it: the node's bit, and the expert's nodes without one replica there.
        self._withdrawals = [
            [(1 << node, mask if row[node] > 1 else mask ^ (1 << node)) for node in unlike if row[node]]
            for row, mask in zip(self.counts, self.masks, strict=True)
        ]

    def descend(self) -> None:
        """Take improving exchanges until there is none left."""
        pairs = list(combinations(range(len(self.counts)), 2))
        at, in_vain = 0, 0
        self._survey()
        while in_vain < len(pairs):
            if self._exchange(*pairs[at]):
                in_vain = 0
            else:
                at, in_vain = (at + 1) % len(pairs), in_vain + 1

    def _exchange(self, one: int, two: int) -> bool:
        """Make the first improving exchange of a replica of ``one`` with a replica of ``two``, if there is any."""
        neither = ~(1 << one | 1 << two)
        one_anyway, two_anyway = self._lost_before[one] & neither, self._lost_before[two] & neither
        if one_anyway and two_anyway:
            return False
        supersets, improves, loss = self.space.supersets, self.space.improves, self.loss
        rest = 0
        for expert, family in enumerate(self._families):
            if expert != one and expert != two:
                rest |= family
        old_one, old_two = self.masks[one], self.masks[two]
        promised_one, promised_two = self.promised[one], self.promised[two]
        for here, left_one in self._withdrawals[one]:
            two_remains = two_anyway or here & old_two
            for there, left_two in self._withdrawals[two]:
                mask_one, mask_two = left_one | there, left_two | here
                # It can only do harm if the old node sets of both still kill whatever they killed: each is then a
                # superset of a new one or of another expert's.
                if (two_remains or mask_one | old_two == old_two) and (
                    one_anyway or there & old_one or mask_two | old_one == old_one
                ):
                    continue
                if mask_one.bit_count() < promised_one or mask_two.bit_count() < promised_two:
                    continue
                if improves(rest | supersets[mask_one] | supersets[mask_two], loss, self._least):
                    self._apply(one, two, here.bit_length() - 1, there.bit_length() - 1)
                    self._survey()
                    return True
        return False

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
