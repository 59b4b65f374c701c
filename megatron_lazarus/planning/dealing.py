"""Dealing replicas into slots: round-robin, level by level, and with a promised number of distinct nodes."""

from __future__ import annotations

import numpy as np

from megatron_lazarus.planning.checks import FloatArray, IntArray

# Below, parting the last replicas that share a node without need is worth its time.
_SMALL = 4096


def seats(slots: IntArray) -> IntArray:
    """The bin of each slot when bins are served in turn while they have free slots, shape [sum of slots].

    Equal items dealt in succession go to different bins as long as enough bins have room. With equal ``slots`` and
    items in order of load, the loads of any two bins differ by at most the largest load of an item.
    """
    bins = np.repeat(np.arange(len(slots)), slots)
    level = np.arange(len(bins)) - np.repeat(np.cumsum(slots) - slots, slots)
    return bins[np.argsort(level, kind="stable")]


def spread(replicas: IntArray, slots: IntArray, promised: IntArray, load: FloatArray) -> IntArray:
    """Balanced spread, counts of shape [experts, nodes]: every expert on as many distinct nodes as it can have.

    ``replicas``, in ascending order, and ``promised`` [experts], ``slots`` [nodes], ``load`` [experts] in tokens per
    replica.
    Each expert is on at least ``promised`` distinct nodes if there is a placement that can do that.
    """
    experts, nodes = len(replicas), len(slots)
    counts = np.zeros((experts, nodes), dtype=np.int64)
    if (slots == slots[0]).all():
        # Fewest replicas first: the most fragile experts of all layers then sit on the same nodes.
        items = np.repeat(np.arange(experts), replicas)
        np.add.at(counts, (items, np.arange(len(items)) % nodes), 1)
        return counts
    # Gale-Ryser's construction: largest promise first, each to the nodes with most room.
    room = slots.copy()
    for expert in np.argsort(-promised, kind="stable"):
        chosen = np.argsort(-room, kind="stable")[: promised[expert]]
        chosen = chosen[room[chosen] > 0]
        counts[expert, chosen] = 1
        room[chosen] -= 1
    return fill(counts, replicas, slots, load)


def fill(core: IntArray, replicas: IntArray, slots: IntArray, load: FloatArray) -> IntArray:
    """``core`` plus the replicas it lacks, in vacant slots: heavy ones to the least loaded nodes, apart if possible.

    Shapes as in ``spread``; ``core`` is [experts, nodes] and at most ``replicas`` and ``slots`` in its sums.
    """
    counts = core.copy()
    items = np.repeat(*_heaviest_first(replicas - core.sum(axis=1), load))
    vacant = slots - core.sum(axis=0)
    node_load = load @ core
    used = 0
    while used < len(items):
        # One level: a slot of every node with the most room, so that large nodes are not left for the end.
        nodes = np.flatnonzero(vacant == vacant.max())
        # The expert that the last level left unfinished keeps away from the nodes that it got there.
        nodes = nodes[np.lexsort((node_load[nodes], counts[items[used], nodes]))]
        level = items[used : used + len(nodes)]
        nodes = nodes[: len(level)]
        counts[level, nodes] += 1
        node_load[nodes] += load[level]
        vacant[nodes] -= 1
        used += len(level)
    if counts.size <= _SMALL:
        _part_twins(counts, counts - core, -(-replicas // len(slots)))
    return counts


def keep_promises(core: IntArray, promised: IntArray, replicas: IntArray, slots: IntArray) -> IntArray:
    """``core`` with replicas added on the emptiest nodes for experts below their promised distinct nodes.

    An expert stays below its promise if the vacant slots do not allow it. Shapes as in ``spread``.
    """
    counts = core.copy()
    room = slots - counts.sum(axis=0)
    for expert in np.flatnonzero((core > 0).sum(axis=1) < promised):
        lacking = int(promised[expert] - (core[expert] > 0).sum())
        nodes = np.argsort(np.where(core[expert] > 0, 0, -room), kind="stable")[:lacking]
        nodes = nodes[(room[nodes] > 0) & (core[expert, nodes] == 0)]
        counts[expert, nodes] += 1
        room[nodes] -= 1
    return counts


def mend(counts: IntArray, promised: IntArray, slots: IntArray) -> IntArray:
    """``counts`` after exchanges between nodes that bring experts up to their ``promised`` distinct nodes.

    An expert stays below its promise if no single exchange helps it without breaking another promise.
    """
    counts = counts.copy()
    for expert in range(len(counts)):
        while (counts[expert] > 0).sum() < promised[expert]:
            source = int(np.argmax(counts[expert]))
            spare = (counts > 0).sum(axis=1) > promised
            movable = (counts > 0) & (counts[expert] == 0)[None, :]
            movable &= (counts > 1) | (counts[:, source] == 0)[:, None] | spare[:, None]
            vacant = (counts[expert] == 0) & (counts.sum(axis=0) < slots)
            if counts[expert, source] < 2 or not (vacant.any() or movable.any()):
                break
            if vacant.any():
                target = int(np.argmax(vacant))
            else:
                other, target = (int(index) for index in np.unravel_index(int(np.argmax(movable)), movable.shape))
                counts[other, target] -= 1
                counts[other, source] += 1
            counts[expert, source] -= 1
            counts[expert, target] += 1
    return counts


def _heaviest_first(replicas: IntArray, load: FloatArray) -> tuple[IntArray, IntArray]:
    order = np.argsort(-load, kind="stable")
    return order, replicas[order]


def _part_twins(counts: IntArray, movable: IntArray, usual: IntArray) -> None:
    """Exchange replicas above an expert's ``usual`` number a node against movable ones elsewhere, where both profit."""
    held, loose = _node_sets(counts), _node_sets(movable)
    for expert, node in np.argwhere((counts > usual[:, None]) & (movable > 0)).tolist():
        while counts[expert, node] > usual[expert] and movable[expert, node] > 0:
            for other, its_loose in enumerate(loose):
                places = its_loose & ~held[expert]
                if places and not held[other] >> node & 1:
                    break
            else:
                break
            place = (places & -places).bit_length() - 1
            for table, sets in ((counts, held), (movable, loose)):
                for row, source, target in ((expert, node, place), (other, place, node)):
                    table[row, source] -= 1
                    table[row, target] += 1
                    sets[row] |= 1 << target
                    if not table[row, source]:
                        sets[row] ^= 1 << source


def _node_sets(table: IntArray) -> list[int]:
    """Per row of [experts, nodes], the nodes where it is positive, as the bits of an int."""
    packed = np.packbits(table > 0, axis=1, bitorder="little")
    return [int.from_bytes(row.tobytes(), "little") for row in packed]
