"""Who sends which record to whom, to get from one plan to the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heapreplace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_lazarus.planning.checks import IntArray
from megatron_lazarus.planning.mapping import previous_of
from megatron_lazarus.planning.plan import Plan, replica_table


class Transfer(NamedTuple):
    """One record to copy from a slot of the old plan to a slot of the new one. Ranks are the new plan's."""

    layer: int
    expert: int
    source: int
    source_slot: int
    target: int
    target_slot: int


class Missing(NamedTuple):
    """A slot of the new plan whose expert no rank has: to be filled from a shadow or a checkpoint."""

    layer: int
    expert: int
    target: int
    target_slot: int


@dataclass(frozen=True)
class Migration:
    """Every slot of the new plan whose record is not there yet, once: in ``moves`` or in ``missing``.

    ``moves`` [transfers, 6] are the transfers as rows of integers, ascending, columns as in ``Transfer``.
    All transfers read the old state, so a layer's arrivals wait in staging until its last record is sent.
    ``between_nodes`` counts the transfers whose source and target are on different nodes. ``staging`` [ranks] is the
    most records that arrive at a rank for one layer: the extra memory, in records, if layers migrate one by one.
    """

    moves: IntArray
    missing: tuple[Missing, ...]
    between_nodes: int
    staging: IntArray

    @cached_property
    def transfers(self) -> tuple[Transfer, ...]:
        """``moves`` as objects."""
        return tuple(Transfer(*row) for row in self.moves.tolist())


def migration(current: Plan, plan: Plan, *, previous_ranks: Sequence[int | None] | None = None) -> Migration:
    """The transfers from ``current`` to ``plan``; ``previous_ranks`` as in ``map_plan``.

    The source of a record is the rank itself if it has the expert in another slot, else a rank of the same node that
    has it, else any rank that has it. Where there is a choice, sources share the work: no transfer's source sends two
    records more than another rank that could have sent it (copies within a rank are not counted).
    Raises ValueError as ``map_plan`` does.
    """
    previous = previous_of(current, plan, previous_ranks)
    # Ranks, nodes and the world are numbered one after another.
    node_of = plan.world_size + np.unique(plan.rank_nodes, return_inverse=True)[1]
    world = int(node_of.max()) + 1
    work = _Work(plan.world_size)
    staging = np.zeros(plan.world_size, dtype=np.int64)
    missing: list[Missing] = []
    for index, (layer, before) in enumerate(zip(plan.layers, current.layers, strict=True)):
        had = replica_table([() if old is None else before.slots[old] for old in previous])
        wanted = replica_table(layer.slots)
        wanted = wanted[~_in_place(wanted, had)]
        staging = np.maximum(staging, np.bincount(wanted[:, 0], minlength=plan.world_size))
        had = had[np.unique(had[:, 0] * layer.num_experts + had[:, 2], return_index=True)[1]]

        # A record comes from the narrowest scope that has it: a rank, a node, or the world.
        had_in, wanted_in = (
            [scope * layer.num_experts + table[:, 2] for scope in (table[:, 0], node_of[table[:, 0]], world)]
            for table in (had, wanted)
        )
        offered = np.concatenate(had_in)
        order = np.argsort(offered, kind="stable")
        is_offered = np.zeros((world + 1) * layer.num_experts, dtype=np.bool_)
        is_offered[offered] = True
        key = np.full(len(wanted), -1)
        for narrower in reversed(wanted_in):
            key = np.where(is_offered[narrower], narrower, key)
        missing += [Missing(index, expert, rank, slot) for rank, slot, expert in wanted[key < 0].tolist()]
        wanted, key = wanted[key >= 0], key[key >= 0]
        by_key = np.argsort(key, kind="stable")
        work.add(index, had[order % max(1, len(had))], offered[order], wanted[by_key], key[by_key], layer.num_experts)
    moves = work.moves()
    between = int((node_of[moves[:, 2]] != node_of[moves[:, 4]]).sum())
    return Migration(moves, tuple(missing), between, staging)


def _in_place(wanted: IntArray, had: IntArray) -> npt.NDArray[np.bool_]:
    """Which of the entries (rank, slot, expert) of ``wanted`` are in ``had``, shape [entries of wanted]."""
    ranks, slots, _ = np.concatenate([wanted, had]).max(axis=0, initial=0) + 1
    holds = np.full((ranks, slots), -1)
    holds[had[:, 0], had[:, 1]] = had[:, 2]
    return holds[wanted[:, 0], wanted[:, 1]] == wanted[:, 2]


class _Work:
    """Collects, layer by layer, groups of transfers with the same possible sources, and shares them out evenly."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        # The last entry takes the copies within a rank, which are no work for the network.
        self._sent = np.zeros(world_size + 1, dtype=np.int64)
        self._parts: list[tuple[IntArray, ...]] = []

    def add(self, layer: int, had: IntArray, offered: IntArray, wanted: IntArray, key: IntArray, experts: int) -> None:
        """Rows (rank, slot, expert): ``had`` by ascending keys ``offered`` can serve ``wanted`` of equal ``key``."""
        keys, demand = np.unique(key, return_counts=True)
        first = np.searchsorted(offered, keys)
        choices = np.searchsorted(offered, keys, side="right") - first
        starts = np.cumsum(choices) - choices
        group = np.repeat(np.arange(len(keys)), choices)
        source = had[np.arange(len(group)) - starts[group] + first[group]]
        worker = np.where(keys[group] < self._world_size * experts, self._world_size, source[:, 0])
        targets = np.concatenate([np.full((len(wanted), 1), layer), wanted], axis=1)
        self._parts.append((group, worker, demand[group], choices[group], source, targets))
        # Work that leaves no choice is known before the rest is shared out.
        np.add.at(self._sent, worker, np.where(choices[group] == 1, demand[group], 0))

    def moves(self) -> IntArray:
        """The transfers in ascending order, columns as in ``Transfer``."""
        shares = [self._share(*part[:4]) for part in self._parts]
        groups = np.cumsum([0] + [int(part[0][-1]) + 1 if len(part[0]) else 0 for part in self._parts])
        group = np.concatenate([part[0] + first for part, first in zip(self._parts, groups[:-1], strict=True)])
        worker, choices, source, targets = (
            np.concatenate([part[field] for part in self._parts]) for field in (1, 3, 4, 5)
        )
        share = np.concatenate(shares)
        free = choices > 1
        share[free] = self._even_out(group[free], worker[free], share[free])
        chosen = source[np.repeat(np.arange(len(share)), share)]
        layer, rank, slot, expert = targets.T
        moves = np.stack([layer, expert, chosen[:, 0], chosen[:, 1], rank, slot], axis=1)
        return moves[np.lexsort(moves.T[::-1])]

    def _share(self, group: IntArray, worker: IntArray, demand: IntArray, choices: IntArray) -> IntArray:
        """An even share of its group's demand for each worker, the remainder to those that have sent least."""
        order = np.lexsort((self._sent[worker], group))
        share = demand // choices
        place = np.arange(len(group)) - np.flatnonzero(np.diff(group, prepend=-1))[group]
        share[order] += place < (demand % choices)
        np.add.at(self._sent, worker, np.where(choices > 1, share, 0))
        return share

    def _even_out(self, group: IntArray, worker: IntArray, share: IntArray) -> IntArray:
        """Deal a group's transfers out again, until none could go to a rank that sends at least two less."""
        starts = np.flatnonzero(np.diff(group, prepend=-1))
        ends = np.append(starts[1:], len(group))
        # Every new deal lowers the sum of squares of what ranks send, so this ends.
        while len(starts):
            load = self._sent[worker]
            most = np.maximum.reduceat(np.where(share > 0, load, -1), starts)
            uneven = np.flatnonzero(most >= np.minimum.reduceat(load, starts) + 2)
            if not len(uneven):
                break
            sent = self._sent.tolist()
            for start, end in zip(starts[uneven].tolist(), ends[uneven].tolist(), strict=True):
                ranks, shares = worker[start:end].tolist(), share[start:end].tolist()
                others = [sent[rank] - count for rank, count in zip(ranks, shares, strict=True)]
                least = [(load_of, place) for place, load_of in enumerate(others)]
                heapify(least)
                dealt = [0] * len(ranks)
                for _ in range(sum(shares)):
                    load_of, place = least[0]
                    heapreplace(least, (load_of + 1, place))
                    dealt[place] += 1
                for load_of, place in least:
                    sent[ranks[place]] = load_of
                share[start:end] = dealt
            self._sent = np.array(sent)
        return share
