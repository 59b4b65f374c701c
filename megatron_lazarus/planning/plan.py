"""The result of planning: which expert sits in which slot of which rank, for every MoE layer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Placement:
    """One MoE layer: ``slots[rank]`` holds the expert ids in that rank's slots, in slot order.

    A rank may hold fewer experts than it has slots, and the same expert more than once.
    Raises ValueError if an expert id is out of range or an expert has no slot at all.
    """

    num_experts: int
    slots: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        held = {expert for row in self.slots for expert in row}
        if not held <= set(range(self.num_experts)):
            raise ValueError(f"slots name experts {sorted(held)}; legal ids are 0..{self.num_experts - 1}")
        if missing := sorted(set(range(self.num_experts)) - held):
            raise ValueError(f"slots leave experts {missing} without a replica; every expert needs at least one")

    @property
    def world_size(self) -> int:
        return len(self.slots)

    def replica_counts(self) -> npt.NDArray[np.int64]:
        """Replicas of each expert on each rank, shape [experts, ranks]."""
        counts = np.zeros((self.num_experts, self.world_size), dtype=np.int64)
        for rank, row in enumerate(self.slots):
            np.add.at(counts[:, rank], list(row), 1)
        return counts

    def holders(self, expert: int) -> tuple[int, ...]:
        """Ranks with at least one replica of ``expert``, ascending."""
        return tuple(rank for rank, row in enumerate(self.slots) if expert in row)


def replica_table(rows: Sequence[Sequence[int]]) -> npt.NDArray[np.int64]:
    """(rank, slot, expert) of every replica in ``rows[rank]``, in this order, shape [replicas, 3]."""
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    ranks = np.repeat(np.arange(len(rows)), lengths)
    slots = np.arange(len(ranks)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    experts = np.fromiter(chain.from_iterable(rows), dtype=np.int64, count=len(ranks))
    return np.stack([ranks, slots, experts], axis=1)


@dataclass(frozen=True)
class Plan:
    """The placements of all MoE layers, and the node of each rank (``rank_nodes[rank]``)."""

    layers: tuple[Placement, ...]
    rank_nodes: tuple[int, ...]

    def __post_init__(self) -> None:
        for index, layer in enumerate(self.layers):
            if layer.world_size != len(self.rank_nodes):
                raise ValueError(
                    f"layers[{index}] is for {layer.world_size} ranks, rank_nodes for {len(self.rank_nodes)}"
                )

    @property
    def world_size(self) -> int:
        return len(self.rank_nodes)

    def to_json(self) -> dict[str, object]:
        return {
            "rank_nodes": list(self.rank_nodes),
            "layers": [
                {"num_experts": layer.num_experts, "slots": [list(row) for row in layer.slots]} for layer in self.layers
            ],
        }

    @classmethod
    def from_json(cls, data: dict[str, object]) -> Plan:
        layers: Sequence[dict[str, object]] = data["layers"]  # type: ignore[assignment]
        return cls(
            layers=tuple(
                Placement(int(layer["num_experts"]), tuple(tuple(row) for row in layer["slots"]))  # type: ignore[call-overload,attr-defined]
                for layer in layers
            ),
            rank_nodes=tuple(data["rank_nodes"]),  # type: ignore[arg-type]
        )

    def digest(self) -> str:
        """SHA-256 of the canonical JSON: equal on two ranks exactly when their plans are equal."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()
