"""Exchanges of replicas between nodes that even out their load and cost no survival."""

from __future__ import annotations

import numpy as np

from megatron_lazarus.planning.checks import FloatArray, IntArray
from megatron_lazarus.planning.losses import node_masks

EVEN = 1.05
"""Tokens of the busiest over the mean that need no evening out: every exchange is a record that may have to move."""

_MOST_NODES = 4096
"""On more, mapping the new plan onto the present nodes would take longer than all the rest of planning."""

_ROOMIEST = 8
"""So many of the least loaded nodes are tried as partners of the busiest one."""

_COMPARISONS = 1024
"""So many times, about, an expert's nodes are compared with another's in vain before a placement stays as it is."""


def unevenness(counts: IntArray, load: FloatArray, ranks: IntArray) -> float:
    """Tokens per rank of the busiest node over the mean of all ranks; shapes as in ``even_out``. 1 without load."""
    tokens = load @ counts
    total = float(tokens.sum())
    return float((tokens / ranks).max()) * float(ranks.sum()) / total if total else 1.0


def even_out(counts: IntArray, load: FloatArray, promised: IntArray, ranks: IntArray) -> IntArray:
    """``counts`` [experts, nodes] after exchanges of two replicas that relieve the busiest node, until it is even.

    ``load`` [experts] in tokens per replica, ``ranks`` [nodes] share a node's tokens, ``promised`` [experts] distinct
    nodes are kept. An exchange is legal if no loss of nodes kills an expert that killed none before: each of the two
    experts' new set of nodes contains some expert's old one. So whatever survived before survives after, with any
    number of lost nodes and whatever odds they fail with. On more than 4,096 nodes nothing is exchanged.
    """
    if counts.shape[1] > _MOST_NODES:
        return counts
    walk = _Walk(counts, load, promised, ranks)
    # Every exchange makes the busier of two nodes less busy; none needs more of them than it has replicas.
    for _ in range(int(counts.sum())):
        if not walk.relieve():
            break
    return walk.counts


class _Walk:
    def __init__(self, counts: IntArray, load: FloatArray, promised: IntArray, ranks: IntArray) -> None:
        self.counts = counts.copy()
        self._load, self._ranks = load, ranks
        self._promised: list[int] = promised.tolist()
        self._tokens = (load @ counts) / ranks
        self._masks = node_masks(counts > 0)
        self._enough = EVEN * float((load @ counts).sum()) / float(ranks.sum())
        self._comparisons = _COMPARISONS

    def relieve(self) -> bool:
        """Make the legal exchange that leaves the busiest node and its partner least loaded; False if none helps."""
        here = int(np.argmax(self._tokens))
        if self._tokens[here] <= self._enough:
            return False
        roomiest = np.argsort(self._tokens, kind="stable")[:_ROOMIEST]
        ones = np.flatnonzero(self.counts[:, here])
        others, columns = np.nonzero(self.counts[:, roomiest])
        partners = roomiest[columns]
        shift = self._load[ones][:, None] - self._load[others][None, :]
        after = np.maximum(
            self._tokens[here] - shift / self._ranks[here], self._tokens[partners] + shift / self._ranks[partners]
        )
        helping = np.flatnonzero(after < self._tokens[here] * (1 - 1e-9))
        known: dict[tuple[int, int, int], bool] = {}
        for index in helping[np.argsort(after.ravel()[helping], kind="stable")].tolist():
            one, position = int(ones[index // len(others)]), index % len(others)
            other, there = int(others[position]), int(partners[position])
            legal = True
            for move in ((other, there, here), (one, here, there)):
                if move not in known:
                    known[move] = self._may(*move)
                legal = legal and known[move]
            if legal:
                self._exchange(one, other, here, there)
                return True
            if self._comparisons <= 0:
                break
        return False

    def _may(self, expert: int, source: int, target: int) -> bool:
        """Whether a replica may go: promises are kept, and whatever kills ``expert`` then kills some expert now."""
        mask, old = self._moved(expert, source, target), self._masks[expert]
        if mask & old == old:
            return True
        if mask.bit_count() < self._promised[expert]:
            return False
        self._comparisons -= len(self._masks)
        return any(mask & its == its for its in self._masks)

    def _exchange(self, one: int, other: int, here: int, there: int) -> None:
        for expert, source, target in ((one, here, there), (other, there, here)):
            self._masks[expert] = self._moved(expert, source, target)
            self.counts[expert, source] -= 1
            self.counts[expert, target] += 1
        shift = self._load[one] - self._load[other]
        self._tokens[here] -= shift / self._ranks[here]
        self._tokens[there] += shift / self._ranks[there]

    def _moved(self, expert: int, source: int, target: int) -> int:
        """The nodes of ``expert`` after a replica has gone from ``source`` to ``target``, as bits."""
        mask = self._masks[expert] | 1 << target
        return mask if self.counts[expert, source] > 1 else mask & ~(1 << source)
