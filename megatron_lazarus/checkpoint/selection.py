"""Which experts a partial checkpoint writes. Pure: integers and counts in, expert numbers out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Policy = Literal["sequential", "load_aware"]
Selection = list[list[int]]
"""The chosen experts of every MoE layer, ascending."""


@dataclass
class Rotation:
    """Which experts have had their turn.

    ``last[layer][expert]``: number of the save that wrote it last, 0 for none. ``turns``: how often it was its turn;
    within a layer these differ by one at most, so that nobody is left out.
    """

    num_experts: Sequence[int]
    last: list[list[int]] = field(default_factory=list)
    turns: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.last = self.last or [[0] * count for count in self.num_experts]
        self.turns = self.turns or [[0] * count for count in self.num_experts]

    def select(self, policy: Policy, k: int, unsaved: Sequence[Sequence[float]]) -> Selection:
        """The next ``k`` experts of every layer (all, where a layer has fewer).

        "sequential" (MoC-System, figure 4): those whose save is longest ago, and at first windows that follow one
        another from layer to layer, so that the ranks share the work. Every expert is in one of any ceil(E / k) saves.
        "load_aware" (section 3.2): in every round of ceil(E / k) saves each expert once, those with most ``unsaved``
        tokens first.
        """
        return [self._select_in(layer, policy, k, unsaved[layer]) for layer in range(len(self.num_experts))]

    def _select_in(self, layer: int, policy: Policy, k: int, unsaved: Sequence[float]) -> list[int]:
        count = self.num_experts[layer]

        def turn(expert: int) -> tuple[float, ...]:
            place = (expert - layer * k) % count
            if policy == "sequential":
                return self.last[layer][expert], place
            return self.turns[layer][expert], -unsaved[expert], place

        return sorted(sorted(range(count), key=turn)[:k])

    def advance(self, selection: Selection, number: int) -> None:
        """Save ``number`` has written these."""
        for layer, experts in enumerate(selection):
            for expert in experts:
                self.last[layer][expert] = number
            if len(experts) < self.num_experts[layer]:
                # A save of everything begins no round and ends none.
                for expert in experts:
                    self.turns[layer][expert] += 1

    def copy(self) -> Rotation:
        return Rotation(self.num_experts, [list(row) for row in self.last], [list(row) for row in self.turns])

    def to_json(self) -> dict[str, Any]:
        return {"last": self.last, "turns": self.turns}

    @classmethod
    def from_json(cls, num_experts: Sequence[int], data: dict[str, Any]) -> Rotation:
        return cls(num_experts, data["last"], data["turns"])
