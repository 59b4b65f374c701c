"""Counting losses of nodes on bit sets: which of the 2^n sets of lost nodes kill an expert."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from megatron_lazarus.planning.checks import FloatArray

COUNTABLE_NODES = 20


class _Supersets(dict[int, int]):
    """Node set -> family of the losses that contain it: those that kill an expert held by these nodes alone."""

    def __init__(self, everything: int, containing: list[int]) -> None:
        super().__init__({0: everything})
        self._containing = containing

    def __missing__(self, node_set: int) -> int:
        low = node_set & -node_set
        family = self[node_set ^ low] & self._containing[low.bit_length() - 1]
        self[node_set] = family
        return family


class LossSpace:
    """All 2^n sets of lost nodes, as the bits of one integer, the smaller sets first.

    A family of sets is an int of 2^n bits, so "killed by any of these experts" is a bitwise or, and counting it by the
    number of lost nodes is a bitwise and with a constant. A set of nodes is an int of n bits.
    """

    def __init__(self, nodes: int, weights: Sequence[float] | None = None) -> None:
        """``weights`` (one a node): odds that the node is among the lost, for ``loss``; equal if None."""
        self.nodes = nodes
        self._everything = (1 << (1 << nodes)) - 1
        sizes = np.zeros(1, dtype=np.int64)
        odds = np.ones(1)
        for node in range(nodes):
            sizes = np.concatenate([sizes, sizes + 1])
            odds = np.concatenate([odds, odds * (1.0 if weights is None else weights[node])])
        # The set of every bit, itself as bits; sets of one size stand side by side.
        sets = np.argsort(sizes, kind="stable")
        containing = [_as_family((sets >> node) & 1 == 1) for node in range(nodes)]
        self.supersets = _Supersets(self._everything, containing)
        self._sizes = sizes[sets]
        self._of_size = [_as_family(self._sizes == size) for size in range(nodes + 1)]
        self._odds: FloatArray | None = None if weights is None else odds[sets]

    @property
    def equal(self) -> bool:
        """Whether all nodes are equally likely to be lost."""
        return self._odds is None

    def killed(self, node_sets: Iterable[int]) -> int:
        """Family of the losses that kill any of the experts held by these node sets."""
        family = 0
        for node_set in set(node_sets):
            family |= self.supersets[node_set]
        return family

    def complement(self, family: int) -> int:
        """Family of all the other losses."""
        return self._everything ^ family

    def counts(self, family: int) -> tuple[int, ...]:
        """Members of the family with 0, 1, …, n lost nodes."""
        return tuple([(family & layer).bit_count() for layer in self._of_size])

    def loss(self, family: int) -> tuple[float, ...]:
        """What placements are compared by, lexicographically: weight of the killed losses of 0, 1, …, n nodes.

        Rounded to 12 digits, so that equal placements compare equal whatever order their weights were summed in.
        """
        if self._odds is None:
            return self.counts(family)
        return tuple(float(f"{weight:.12g}") for weight in self.weights_by_size(family))

    def improves(self, family: int, loss: tuple[float, ...], least: int = 0) -> bool:
        """Whether ``self.loss(family) < loss``, found without counting more than it takes.

        ``least``: neither kills anything by fewer lost nodes.
        """
        if self._odds is not None:
            return self.loss(family) < loss
        for size in range(least, self.nodes + 1):
            members = (family & self._of_size[size]).bit_count()
            if members != loss[size]:
                return members < loss[size]
        return False

    def weights_by_size(self, family: int) -> FloatArray:
        """Sum over the family's members of their nodes' product of weights, by number of lost nodes, shape [n+1]."""
        length = 1 << self.nodes
        raw = np.frombuffer(family.to_bytes(max(1, length // 8), "little"), dtype=np.uint8)
        members = np.unpackbits(raw, bitorder="little")[:length].astype(bool)
        odds = np.ones(length) if self._odds is None else self._odds
        sums = np.bincount(self._sizes[members], weights=odds[members], minlength=self.nodes + 1)
        return sums.astype(np.float64)


@lru_cache(maxsize=8)
def loss_space(nodes: int, weights: tuple[float, ...] | None = None) -> LossSpace:
    """The shared LossSpace of these nodes (its tables are worth keeping between calls)."""
    return LossSpace(nodes, weights)


def _as_family(members: npt.NDArray[np.bool_]) -> int:
    return int.from_bytes(np.packbits(members, bitorder="little").tobytes(), "little")


def node_masks(held: npt.NDArray[np.bool_]) -> list[int]:
    """The node set of every expert as an int, from a truth table [experts, nodes]."""
    return (held @ (1 << np.arange(held.shape[1]))).tolist()
