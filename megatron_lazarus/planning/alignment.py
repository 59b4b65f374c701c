"""Renaming the nodes of each layer's placement so that all layers are killed by the same losses."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np

from megatron_lazarus.planning.checks import IntArray
from megatron_lazarus.planning.losses import LossSpace, node_masks


def align(layers: Sequence[IntArray], space: LossSpace, alike: IntArray) -> list[IntArray]:
    """``layers`` (counts [experts, nodes]) with nodes of equal ``alike`` [nodes] exchanged, layer by layer.

    The model is lost as soon as one layer is, so the layers' killed losses should overlap. The most fragile layer
    stays; each next one takes the exchange of two nodes that lowers the joint loss most, until none does.
    """
    result = list(layers)
    masks = [sorted(set(node_masks(counts > 0))) for counts in layers]
    killed = [space.killed(sets) for sets in masks]
    pairs = [(one, two) for one, two in combinations(range(space.nodes), 2) if alike[one] == alike[two]]
    joint = 0
    for layer in sorted(range(len(result)), key=lambda index: space.loss(killed[index]), reverse=True):
        if killed[layer] & ~joint and joint:
            order = np.arange(space.nodes)
            sets, loss = masks[layer], space.loss(joint | killed[layer])
            while True:
                best = None
                for pair in pairs:
                    exchanged = _exchanged(sets, *pair)
                    if exchanged == sets:
                        continue
                    joined = joint | space.killed(exchanged)
                    if space.improves(joined, loss):
                        best, best_sets, loss = pair, exchanged, space.loss(joined)
                if best is None:
                    break
                sets = best_sets
                order[list(best)] = order[list(reversed(best))]
            result[layer] = result[layer][:, order]
            killed[layer] = space.killed(sets)
        joint |= killed[layer]
    return result


def _exchanged(node_sets: list[int], one: int, two: int) -> list[int]:
    """The node sets with the two nodes' names exchanged."""
    both = 1 << one | 1 << two
    return [mask ^ both if (mask >> one ^ mask >> two) & 1 else mask for mask in node_sets]
