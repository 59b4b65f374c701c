"""Which expert goes to which node: the most losses survived first, even load second."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import combinations, islice
from math import comb

import numpy as np
import numpy.typing as npt

from megatron_lazarus.planning.alignment import align
from megatron_lazarus.planning.checks import FloatArray, IntArray, enough_slots, integer, node_weights, slot_counts
from megatron_lazarus.planning.dealing import fill, keep_promises, spread
from megatron_lazarus.planning.evening import EVEN, even_out, unevenness
from megatron_lazarus.planning.local_search import search
from megatron_lazarus.planning.losses import LossSpace, loss_space, node_masks
from megatron_lazarus.planning.mro import Groups, core, dealt_members, group_nodes, level_groups, members, paper_groups

SEARCHED_NODES = 12
_SPLITS = 16
_FILLED = 3


def place_replicas(
    replicas: npt.ArrayLike,
    slots: int | Sequence[int],
    min_replicas: int,
    *,
    nodes: int | None = None,
    loads: npt.ArrayLike | None = None,
    weights: Sequence[float] | None = None,
) -> IntArray:
    """Replicas of each expert on each node for one layer, shape [experts, nodes].

    ``replicas`` [experts] as from ``allocate_replicas``; ``slots`` per node, one number (then ``nodes`` says how many)
    or one for each node; ``loads`` [experts] in tokens, for the balance (default: in proportion to the replicas);
    ``weights`` [nodes] are the odds with which nodes fail (default: equal).

    Every expert is on at least min(min_replicas, its replicas, nodes) distinct nodes.
    Maximum Rank Overlap (Lazarus, appendix A.2) where it is proved: equal slots and weights, no truncated group.
    Else the best of levelled groups, balanced spread and, up to SEARCHED_NODES nodes, local search. Best means: the
    fewest killed losses of one node, then of two, and so on; on more nodes, the fewest smallest node sets of an expert.

    Raises ValueError if the slots do not hold the replicas, an expert has none, or no placement keeps the minimum.
    """
    wanted = np.array([integer(f"replicas[{index}]", count, 1) for index, count in enumerate(np.asarray(replicas))])
    if np.ndim(slots):
        nodes = len(slots) if nodes is None else nodes  # type: ignore[arg-type]
    node_slots = slot_counts("slots", slots, integer("nodes", nodes, 1), "node")
    min_replicas = integer("min_replicas", min_replicas, 1, len(node_slots))
    enough_slots("slots", int(node_slots.sum()), int(wanted.sum()))
    load = np.ones(len(wanted)) if loads is None else np.asarray(loads, dtype=np.float64) / wanted
    odds = None if weights is None else node_weights("weights", weights)
    return NodePlacer(node_slots, min_replicas, odds).place(wanted, load)


class NodePlacer:
    """Places the layers of one model on the same nodes; layers with the same replica counts share the search."""

    def __init__(
        self,
        slots: IntArray,
        promises: int | IntArray,
        weights: FloatArray | None = None,
        ranks: IntArray | None = None,
        max_imbalance: float | None = None,
    ) -> None:
        """``slots``, ``weights`` (None: equal) and ``ranks`` that share a node's load (None: one), shape [nodes].

        ``max_imbalance``: tokens of the busiest node over the mean beyond which load comes before survival of losses
        that the promises do not cover; None: it never does.
        ``promises``: distinct nodes that an expert with enough replicas must have, one number for all or [experts],
        the expert with fewest replicas first.
        """
        self.slots = slots
        self.promises = promises
        self.max_imbalance = math.inf if max_imbalance is None else max_imbalance
        self.ranks = np.ones(len(slots), dtype=np.int64) if ranks is None else ranks
        self.weights = None if weights is None or (weights == weights[0]).all() else weights
        # MRO's nodes: large ones first, among equals the reliable ones first.
        self._kinds = np.stack([np.zeros(len(slots)) if self.weights is None else self.weights, -slots])
        self.node_order = np.lexsort(self._kinds)
        self.uniform = bool((slots == slots[0]).all()) and self.weights is None
        self._known: dict[tuple[int, ...], IntArray] = {}

    def promised(self, ascending: IntArray) -> IntArray:
        """Distinct nodes that each expert must have."""
        return np.minimum(np.minimum(ascending, self.promises), len(self.slots))

    def place(self, replicas: IntArray, load: FloatArray) -> IntArray:
        """Counts [experts, nodes] for ``replicas`` [experts] that carry ``load`` [experts] tokens each."""
        return self.place_layers(replicas[None], load[None])[0]

    def place_layers(self, replicas: IntArray, load: FloatArray) -> list[IntArray]:
        """Counts [experts, nodes] of every layer, for ``replicas`` and ``load`` of shape [layers, experts].

        Layers are aligned: they lean on the same nodes as far as they can, because the model needs every layer.
        """
        order = np.lexsort((load, replicas))
        ascending = np.take_along_axis(replicas, order, axis=1)
        load = np.take_along_axis(load, order, axis=1)
        groups = [paper_groups(row, self.slots[self.node_order]) for row in ascending]
        proved = [self.uniform and not group.truncated for group in groups]
        sizes = [group.nodes for group, whole in zip(groups, proved, strict=True) if whole]
        shared = tuple(np.min(sizes, axis=0).tolist()) if sizes else ()
        result = []
        for layer, row in enumerate(ascending):
            counts = self._grouped(groups[layer], row, load[layer], shared) if proved[layer] else None
            if counts is None:
                counts = even_out(self._searched(row, load[layer]), load[layer], self.promised(row), self.ranks)
            elif self._hopeless(counts):
                counts = min((counts, self._even(row, load[layer], counts)), key=partial(self._unevenness, load[layer]))
            if self._unevenness(load[layer], counts) > self.max_imbalance:
                counts = self._balanced(groups[layer], row, load[layer], counts)
            placed = np.empty_like(counts)
            placed[order[layer]] = counts
            result.append(placed)
        if len(self.slots) > SEARCHED_NODES:
            return result
        alike = np.unique(self._kinds, axis=1, return_inverse=True)[1]
        return align(result, self._space(), alike)

    def _unevenness(self, load: FloatArray, counts: IntArray) -> float:
        return unevenness(counts, load, self.ranks)

    def _hopeless(self, counts: IntArray) -> bool:
        """Whether the loss of any one node kills an expert: then nothing is left to protect, and balance decides."""
        alone = (counts > 0).sum(axis=1) == 1
        return bool((counts[alone] > 0).any(axis=0).all())

    def _even(self, ascending: IntArray, load: FloatArray, otherwise: IntArray) -> IntArray:
        """The balanced spread, if it keeps the promises."""
        counts = spread(ascending, self.slots, self.promised(ascending), load)
        return counts if ((counts > 0).sum(axis=1) >= self.promised(ascending)).all() else otherwise

    def _balanced(self, groups: Groups, ascending: IntArray, load: FloatArray, otherwise: IntArray) -> IntArray:
        """The placement in the fewest groups that is as even as wanted, or else the most even one.

        More groups of fewer experts leave room for heavy experts on every node, and there are more ways to lose one.
        """
        best, judge = otherwise, partial(self._unevenness, load)
        experts, nodes, fewest = len(ascending), len(self.slots), len(groups.nodes)
        most = min(experts, nodes)
        for number in sorted({min(fewest + more, most) for more in (0, *(2**power for power in range(10)))}):
            sizes = tuple(experts // number + (group < experts % number) for group in range(number))
            if sizes[0] <= self.slots.min():
                level = level_groups(ascending, nodes, sizes)
                found = self._grouped(level, ascending, load, level.nodes)
                best = min(best, best if found is None else found, key=judge)
            if judge(best) <= self.max_imbalance:
                return best
        even = even_out(self._even(ascending, load, best), load, self.promised(ascending), self.ranks)
        return min(best, even, key=judge)

    def _grouped(
        self, groups: Groups, ascending: IntArray, load: FloatArray, shared: tuple[int, ...]
    ) -> IntArray | None:
        """The groups' placement, vacant slots filled; None if an expert does not get its promised distinct nodes."""
        nodes = group_nodes(groups, self.node_order, shared)
        found: list[IntArray] = []
        for who in (members(groups), dealt_members(groups, load)):
            begun = self._begun(who, nodes, ascending)
            counts = None if begun is None else self._filled(begun, ascending, load)
            if counts is not None:
                found.append(even_out(counts, load, self.promised(ascending), self.ranks))
                # Dealt anew only where there is something to gain.
                if self._unevenness(load, found[-1]) <= EVEN:
                    break
        return min(found, key=partial(self._unevenness, load), default=None)

    def _begun(self, who: list[IntArray], nodes: list[IntArray], ascending: IntArray) -> IntArray | None:
        """The groups' own replicas and what the promises ask for beyond; None if that is too many of an expert."""
        counts = core(who, nodes, len(self.slots))
        counts = keep_promises(counts, self.promised(ascending), ascending, self.slots)
        return None if (counts.sum(axis=1) > ascending).any() else counts

    def _filled(self, begun: IntArray, ascending: IntArray, load: FloatArray) -> IntArray | None:
        """``begun`` with all replicas; None if an expert does not get its promised distinct nodes."""
        counts = fill(begun, ascending, self.slots, load)
        return counts if ((counts > 0).sum(axis=1) >= self.promised(ascending)).all() else None

    def _searched(self, ascending: IntArray, load: FloatArray) -> IntArray:
        key = tuple(ascending.tolist())
        if key not in self._known:
            self._known[key] = self._search(ascending, load)
        return self._known[key]

    def _search(self, ascending: IntArray, load: FloatArray) -> IntArray:
        begun = list(self._beginnings(ascending, load))
        few = len(self.slots) <= SEARCHED_NODES
        if few:
            # What fills the vacant slots rarely changes which of them are the best.
            begun.sort(key=self._loss)
        filled = (self._filled(counts, ascending, load) for counts in begun)
        candidates = list(islice((counts for counts in filled if counts is not None), _FILLED if few else None))
        if not candidates:
            raise ValueError(
                f"replicas are {ascending.tolist()}; nodes with {self.slots.tolist()} slots cannot hold each expert on "
                f"min(its replicas, {self.promises}) distinct nodes"
            )
        if not few:
            return min(candidates, key=lambda counts: _smallest_sets(counts, self.weights))
        # Thorough where every case is compared with brute force; beyond, different starts find more than shaking does.
        shakes = 30 if len(self.slots) <= 6 else 0
        return search(candidates, self.promised(ascending), self._space(), shakes)

    def _loss(self, counts: IntArray) -> tuple[float, ...]:
        space = self._space()
        return space.loss(space.killed(node_masks(counts > 0)))

    def _space(self) -> LossSpace:
        return loss_space(len(self.slots), None if self.weights is None else tuple(self.weights.tolist()))

    def _beginnings(self, ascending: IntArray, load: FloatArray) -> Iterator[IntArray]:
        """Placements by different rules, vacant slots yet to be filled."""
        yield spread(ascending, self.slots, self.promised(ascending), load)
        options = {paper_groups(ascending, self.slots[self.node_order])}
        options |= {
            level_groups(ascending, len(self.slots), members)
            for members in _compositions(len(ascending), int(self.slots.min()))
            if len(members) <= len(self.slots)
        }
        for groups in sorted(options, key=lambda groups: (groups.experts, groups.nodes)):
            if sum(groups.experts) == len(ascending):
                begun = self._begun(members(groups), group_nodes(groups, self.node_order, groups.nodes), ascending)
                if begun is not None:
                    yield begun


def _compositions(experts: int, capacity: int) -> Iterator[tuple[int, ...]]:
    """Sizes of as few groups as hold all experts, and of one more: every split while there are few, else two."""
    fewest = -(-experts // capacity)
    for groups in (fewest, fewest + 1):
        if groups <= experts and comb(experts - 1, groups - 1) <= _SPLITS:
            for cuts in combinations(range(1, experts), groups - 1):
                sizes = tuple(np.diff((0, *cuts, experts)).tolist())
                if max(sizes) <= capacity:
                    yield sizes
    yield tuple(experts // fewest + (group < experts % fewest) for group in range(fewest))
    yield (experts - capacity * (fewest - 1),) + (capacity,) * (fewest - 1)


def _smallest_sets(counts: IntArray, weights: FloatArray | None) -> tuple[tuple[int, float], ...]:
    """Distinct node sets of the experts by ascending size, as (-size, their weight): compares like the first losses.

    A set weighs the product of its nodes' weights; without weights each counts one.
    """
    sets = np.unpackbits(np.unique(np.packbits(counts > 0, axis=1), axis=0), axis=1, count=counts.shape[1])
    sizes = sets.sum(axis=1)
    log_odds = np.zeros(counts.shape[1]) if weights is None else np.log(weights)
    # The largest exponents of floating point; only small sets, of far smaller products, ever decide.
    weight = np.exp(np.clip(sets @ log_odds, -700, 700))
    return tuple((-int(size), round(float(weight[sizes == size].sum()), 9)) for size in np.unique(sizes))
