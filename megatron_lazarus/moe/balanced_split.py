"""Shares each expert's tokens over its replicas so that the busiest rank has as few tokens as possible.

With equal quotas a rank whose experts are all popular stays busy while the other replicas of these experts have time.
Here tokens move away from ranks above a limit L, along chains of replicas, until none is above it. Where no chain leads
to a rank below L, the ranks that were reached hold all replicas of all their experts: no split gives their busiest one
less than their mean, which becomes the next L. So L ends at the least possible maximum, in whole tokens (a maximum flow
by augmenting paths, Ford and Fulkerson 1956, with its minimum cuts as lower bounds).
"""

from __future__ import annotations

from collections import deque

import numpy as np

from megatron_lazarus.moe.dispatch import IntArray, replica_quotas


def balanced_quotas(tokens: IntArray, replicas: IntArray) -> IntArray:
    """Tokens each rank takes of each expert, shape [experts, ranks]; same arguments as ``replica_quotas``.

    The largest total of a rank is the least that is possible; equal quotas are changed no more than that needs.
    Raises ValueError if an expert with tokens has no replica.
    """
    quotas = replica_quotas(tokens, replicas)
    held = replicas > 0
    places = held.sum(axis=1)
    if (tokens[places == 0] > 0).any():
        raise ValueError("an expert with tokens has no replica")
    used = max(1, int(held.any(axis=0).sum()))
    limit = max(-(-int(tokens.sum()) // used), int((-(-tokens // np.maximum(places, 1))).max(initial=0)))
    if quotas.sum(axis=0).max(initial=0) <= limit:
        return quotas
    split = _Split(quotas, replicas)
    for rank in np.argsort(-quotas.sum(axis=0), kind="stable").tolist():
        while split.loads[rank] > limit:
            limit = split.relieve(rank, limit)
    return np.array(split.tokens, dtype=np.int64)


class _Split:
    """A split that is being improved. ``tokens[expert][rank]``, ``loads[rank]``."""

    def __init__(self, quotas: IntArray, replicas: IntArray) -> None:
        self.tokens: list[list[int]] = quotas.tolist()
        self.loads: list[int] = quotas.sum(axis=0).tolist()
        self._ranks_of = [np.flatnonzero(row).tolist() for row in replicas]
        self._experts_on = [np.flatnonzero(column).tolist() for column in replicas.T]

    def relieve(self, rank: int, limit: int) -> int:
        """Move tokens from ``rank`` to one below the limit, or return a higher limit if there is none to reach."""
        came_by: dict[int, tuple[int, int]] = {rank: (-1, -1)}
        seen = set()
        queue = deque([rank])
        while queue:
            here = queue.popleft()
            for expert in self._experts_on[here]:
                if expert in seen or not self.tokens[expert][here]:
                    continue
                seen.add(expert)
                for there in self._ranks_of[expert]:
                    if there not in came_by:
                        came_by[there] = (expert, here)
                        if self.loads[there] < limit:
                            self._move(came_by, rank, there, limit)
                            return limit
                        queue.append(there)
        return -(-sum(self.loads[reached] for reached in came_by) // len(came_by))

    def _move(self, came_by: dict[int, tuple[int, int]], first: int, last: int, limit: int) -> None:
        chain = []
        there = last
        while there != first:
            expert, here = came_by[there]
            chain.append((expert, here, there))
            there = here
        amount = min(self.loads[first] - limit, limit - self.loads[last])
        amount = min(amount, *(self.tokens[expert][here] for expert, here, _ in chain))
        for expert, here, there in chain:
            self.tokens[expert][here] -= amount
            self.tokens[expert][there] += amount
        self.loads[first] -= amount
        self.loads[last] += amount
