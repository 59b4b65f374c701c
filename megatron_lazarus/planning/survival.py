"""How likely a plan survives: exact by counting where that is feasible, else sampled with a confidence interval."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import comb, sqrt

import numpy as np
import numpy.typing as npt

from megatron_lazarus.planning.checks import FloatArray, IntArray, by_node, first_seen_order, integer, node_weights
from megatron_lazarus.planning.losses import COUNTABLE_NODES, loss_space, node_masks
from megatron_lazarus.planning.plan import Plan, replica_table

BoolArray = npt.NDArray[np.bool_]
_LISTED_LOSSES = 100_000
_MINIMISED_SETS = 4_096
# Beyond, a weight of a loss, about 2^units, would leave the range of floating point.
_COUNTED_UNITS = 900
_Z95 = 1.959963984540054


@dataclass(frozen=True)
class Survival:
    """Probability that every expert of every layer keeps a replica; ``low`` = ``high`` = it where it is ``exact``.

    Otherwise [low, high] is the 95 % Wilson score interval of the sampled proportion.
    """

    probability: float
    low: float
    high: float
    exact: bool


def lost_experts(plan: Plan, dead_nodes: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Experts of each layer, ascending, that have no replica outside ``dead_nodes`` (numbers as in ``rank_nodes``).

    Raises ValueError for a node that the plan does not have.
    """
    dead = set(dead_nodes)
    if unknown := sorted(dead - set(plan.rank_nodes)):
        raise ValueError(f"dead_nodes names unknown nodes {unknown}; legal nodes are {sorted(set(plan.rank_nodes))}")
    alive = [rank for rank, node in enumerate(plan.rank_nodes) if node not in dead]
    return tuple(
        tuple(sorted(set(range(layer.num_experts)).difference(*(layer.slots[rank] for rank in alive))))
        for layer in plan.layers
    )


def survival(
    plan: Plan,
    k: int,
    *,
    domains: Mapping[int, Hashable] | None = None,
    weights: Mapping[int, float] | None = None,
    samples: int = 20_000,
    seed: int = 0,
) -> Survival:
    """Probability that the plan survives the loss of ``k`` failure units, all layers jointly.

    A unit is a node, or with ``domains`` (node -> label) all nodes of one label. The lost set is uniform among the sets
    of k units; with ``weights`` (node -> odds to fail; a domain has its nodes' mean) its probability is in proportion
    to the product of its weights: that of independent failures, given that k of them happen.

    Exact by counting where the experts' sets of units fall into independent parts of at most COUNTABLE_NODES units, or
    where the losses are few enough to list; else ``samples`` losses are drawn with ``seed``.
    Raises ValueError for k outside 0..units, or labels of unknown or missing nodes.
    """
    model = _Model(plan, domains, weights)
    return model.survival(integer("k", k, 0, model.units), integer("samples", samples, 1), seed)


def survival_curve(
    plan: Plan,
    *,
    domains: Mapping[int, Hashable] | None = None,
    weights: Mapping[int, float] | None = None,
    samples: int = 20_000,
    seed: int = 0,
) -> tuple[Survival, ...]:
    """``survival`` for 0, 1, … all units lost."""
    model = _Model(plan, domains, weights)
    return tuple(model.survival(k, integer("samples", samples, 1), seed) for k in range(model.units + 1))


class _Model:
    """The distinct sets of units that hold an expert, and the odds of the units."""

    def __init__(self, plan: Plan, domains: Mapping[int, Hashable] | None, weights: Mapping[int, float] | None) -> None:
        nodes = sorted(set(plan.rank_nodes))
        unit_of = np.arange(len(nodes)) if domains is None else first_seen_order(by_node("domains", domains, nodes))
        self.units = int(unit_of.max()) + 1
        self.odds: FloatArray | None = None
        if weights is not None:
            odds = node_weights("weights", by_node("weights", weights, nodes))
            mean = np.bincount(unit_of, weights=odds) / np.bincount(unit_of)
            # Only ratios matter; around 1 the products below stay in range.
            self.odds = mean / np.exp(np.log(mean).mean())
        rank_unit = unit_of[np.searchsorted(nodes, plan.rank_nodes)]
        self.sets = _minimal(_held(plan, rank_unit, self.units))
        self._alive: list[float] | list[int] | None = None
        self._counted = False

    def survival(self, k: int, samples: int, seed: int) -> Survival:
        sizes = self.sets.sum(axis=1)
        if k < sizes.min():
            return _exactly(1.0)
        if k == self.units:
            return _exactly(0.0)
        if not self._counted:
            self._alive, self._counted = self._count_parts(), True
        if self._alive is not None:
            return _exactly(self._alive[k] / self._all()[k])
        if comb(self.units, k) <= _LISTED_LOSSES:
            return _exactly(self._listed(k))
        return self._sampled(k, samples, seed)

    def _all(self) -> list[int] | list[float]:
        """Number, or weight, of the losses of each size."""
        if self.odds is None:
            return [comb(self.units, k) for k in range(self.units + 1)]
        total = np.ones(1)
        for odds in self.odds:
            total = np.convolve(total, [1.0, odds])
        return total.tolist()

    def _count_parts(self) -> list[int] | list[float] | None:
        """Losses of each size that kill nobody, as a product over independent parts; None if a part is too large."""
        if self.units > _COUNTED_UNITS:
            return None
        parts = _parts(self.sets)
        if any(len(units) > COUNTABLE_NODES for units, _ in parts):
            return None
        free = self.units - int(self.sets.any(axis=0).sum())
        if self.odds is None:
            # Python's whole numbers: binomials of some hundred nodes exceed every fixed size.
            counts = np.array([comb(free, lost) for lost in range(free + 1)], dtype=object)
            for units, sets in parts:
                space = loss_space(len(units))
                alive = space.counts(space.complement(space.killed(node_masks(sets))))
                counts = np.convolve(counts, np.array(alive, dtype=object))
            return counts.tolist()
        weight = np.ones(1)
        for units, sets in parts:
            space = loss_space(len(units), tuple(self.odds[units].tolist()))
            weight = np.convolve(weight, space.weights_by_size(space.complement(space.killed(node_masks(sets)))))
        for unit in np.flatnonzero(~self.sets.any(axis=0)):
            weight = np.convolve(weight, [1.0, self.odds[unit]])
        return weight.tolist()

    def _listed(self, k: int) -> float:
        lost = np.array(list(combinations(range(self.units), k)), dtype=np.int64)
        weight = np.ones(len(lost)) if self.odds is None else self.odds[lost].prod(axis=1)
        return float(weight[~self._killed(lost)].sum() / weight.sum())

    def _killed(self, lost: IntArray) -> BoolArray:
        """Whether each loss [losses, k] contains one of the sets."""
        sizes = self.sets.sum(axis=1)
        sets = self.sets[sizes <= lost.shape[1]].T.astype(np.float32)
        sizes = sizes[sizes <= lost.shape[1]]
        killed = np.empty(len(lost), dtype=bool)
        step = max(1, 20_000_000 // max(self.units, len(sizes)))
        for start in range(0, len(lost), step):
            chunk = lost[start : start + step]
            member = np.zeros((len(chunk), self.units), dtype=np.float32)
            np.put_along_axis(member, chunk, 1, axis=1)
            killed[start : start + step] = (member @ sets == sizes).any(axis=1)
        return killed

    def _sampled(self, k: int, samples: int, seed: int) -> Survival:
        source = np.random.default_rng([seed, k])
        killed = 0
        step = max(1, min(samples, 4_000_000 // self.units))
        for start in range(0, samples, step):
            lost = self._draw(source, k, min(step, samples - start))
            killed += int(self._killed(lost).sum())
        proportion = 1 - killed / samples
        centre = (proportion + _Z95**2 / (2 * samples)) / (1 + _Z95**2 / samples)
        spread = sqrt(proportion * (1 - proportion) / samples + _Z95**2 / (4 * samples**2))
        half = _Z95 * spread / (1 + _Z95**2 / samples)
        return Survival(proportion, max(0.0, centre - half), min(1.0, centre + half), False)

    def _draw(self, source: np.random.Generator, k: int, samples: int) -> IntArray:
        """Lost units [samples, k]."""
        if self.odds is None:
            return np.argpartition(source.random((samples, self.units)), k - 1, axis=1)[:, :k].astype(np.int64)
        # Unit by unit: lost with the share of the remaining losses' weight that contains it (conditional Bernoulli).
        log_rest = _log_elementary(self.odds, k)
        missing = np.full(samples, k)
        lost = np.zeros((samples, self.units), dtype=bool)
        for unit, odds in enumerate(self.odds):
            share = np.zeros(samples)
            open_ = missing > 0
            wanted = missing[open_]
            share[open_] = np.exp(np.log(odds) + log_rest[unit + 1, wanted - 1] - log_rest[unit, wanted])
            lost[:, unit] = source.random(samples) < share
            missing -= lost[:, unit]
        return np.nonzero(lost)[1].reshape(samples, k).astype(np.int64)


def _log_elementary(odds: FloatArray, k: int) -> FloatArray:
    """Logarithms of the elementary symmetric polynomials of odds[unit:] of degree 0..k, shape [units + 1, k + 1]."""
    table = np.full((len(odds) + 1, k + 1), -np.inf)
    table[:, 0] = 0
    for unit in range(len(odds) - 1, -1, -1):
        table[unit, 1:] = np.logaddexp(table[unit + 1, 1:], np.log(odds[unit]) + table[unit + 1, :-1])
    return table


def _exactly(probability: float) -> Survival:
    return Survival(probability, probability, probability, True)


def _held(plan: Plan, rank_unit: IntArray, units: int) -> BoolArray:
    """Distinct sets of units that hold an expert of any layer, as a truth table [sets, units]."""
    tables = []
    for layer in plan.layers:
        held = np.zeros((layer.num_experts, units), dtype=bool)
        replicas = replica_table(layer.slots)
        held[replicas[:, 2], rank_unit[replicas[:, 0]]] = True
        tables.append(np.packbits(held, axis=1))
    return np.unpackbits(np.unique(np.concatenate(tables), axis=0), axis=1, count=units).astype(bool)


def _minimal(sets: BoolArray) -> BoolArray:
    """The sets that contain no other one (all of them if there are too many to compare): only they decide."""
    if len(sets) > _MINIMISED_SETS:
        return sets
    numbers = sets.astype(np.float32)
    contains = (numbers @ numbers.T) == sets.sum(axis=1)[None, :]
    np.fill_diagonal(contains, False)
    return sets[~contains.any(axis=1)]


def _parts(sets: BoolArray) -> list[tuple[IntArray, BoolArray]]:
    """Units and sets of each part: sets of different parts have no unit in common."""
    result = []
    left = np.ones(len(sets), dtype=bool)
    while left.any():
        units = sets[int(np.argmax(left))]
        while True:
            touching = left & (sets & units).any(axis=1)
            grown = sets[touching].any(axis=0)
            if (grown == units).all():
                break
            units = grown
        members = np.flatnonzero(units)
        result.append((members.astype(np.int64), sets[touching][:, members]))
        left &= ~touching
    return result
