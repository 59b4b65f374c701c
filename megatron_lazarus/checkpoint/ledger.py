"""Lost tokens: updates of experts that a recovery could not restore, and how many experts to save to bound them. Pure.

Counts are token-expert assignments. An expert *holds* the updates that its live state contains; after a loss it holds
what its saved state contained. So nothing is counted twice, however often an expert is lost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Counts = npt.NDArray[np.float64]


class Ledger:
    """The account of one run.

    ``assigned[layer]``: assignments in all committed steps; ``held[layer][expert]``: those whose updates the expert
    holds; ``saved[layer][expert]``: those that its newest saved state holds. ``planned_steps``: of the whole run.
    """

    def __init__(self, num_experts: Sequence[int]) -> None:
        self.steps = 0
        self.planned_steps: int | None = None
        self.assigned = np.zeros(len(num_experts))
        self.held: list[Counts] = [np.zeros(count) for count in num_experts]
        self.saved: list[Counts] = [np.zeros(count) for count in num_experts]

    def add(self, loads: Sequence[Counts]) -> None:
        """A committed step, and the tokens that each expert got in it, by layer."""
        self.steps += 1
        for layer, load in enumerate(loads):
            self.assigned[layer] += load.sum()
            self.held[layer] += load

    def save(self, experts: Mapping[tuple[int, int], float]) -> None:
        """These (layer, expert) are on storage, holding so many tokens."""
        for (layer, expert), tokens in experts.items():
            self.saved[layer][expert] = tokens

    def lose(self, experts: Mapping[tuple[int, int], float]) -> float:
        """These are restored from states that hold so many tokens; returns how many are lost by it."""
        lost = 0.0
        for (layer, expert), tokens in experts.items():
            lost += self.held[layer][expert] - tokens
            self.held[layer][expert] = self.saved[layer][expert] = tokens
        return lost

    def unsaved(self) -> list[Counts]:
        """Tokens of each expert since its last save, by layer."""
        return [held - saved for held, saved in zip(self.held, self.saved, strict=True)]

    def fraction(self, tokens: Sequence[float], so_far: bool = False) -> float:
        """Mean over layers of ``tokens[layer]`` divided by the assignments of the planned run, or of the run so far.

        Without a plan both are the same. What a step assigns is taken from the steps so far.
        """
        longer = 1.0
        if not so_far and self.planned_steps is not None and self.steps:
            longer = max(1.0, self.planned_steps / self.steps)
        shares = [
            lost / (assigned * longer) for lost, assigned in zip(tokens, self.assigned, strict=True) if assigned > 0
        ]
        return math.fsum(shares) / len(shares) if shares else 0.0

    def lost(self) -> Counts:
        """Lost tokens by layer."""
        return self.assigned - np.array([held.sum() for held in self.held])

    def plt(self, so_far: bool = False) -> float:
        """The proportion of lost tokens (MoC-System, equation 7)."""
        return self.fraction(self.lost().tolist(), so_far)

    def to_json(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "assigned": self.assigned.tolist(),
            "held": [held.tolist() for held in self.held],
            "saved": [saved.tolist() for saved in self.saved],
        }

    def restore(self, data: Mapping[str, Any]) -> None:
        """Take over what ``to_json`` gave."""
        self.steps = int(data["steps"])
        self.assigned = np.array(data["assigned"], dtype=np.float64)
        self.held = [np.array(row, dtype=np.float64) for row in data["held"]]
        self.saved = [np.array(row, dtype=np.float64) for row in data["saved"]]


def choose_k(base: int, most: int, limit: float, plt_if_lost: Callable[[int], float]) -> int:
    """The least of base, 2 base, 4 base, ... for which the proportion of lost tokens stays within ``limit``.

    ``plt_if_lost(k)``: what it becomes if, after a save of k experts per layer, the worst happens. ``most`` where
    nothing less will do (MoC-System, section 5.3: K doubles; here it also falls again when there is room).
    """
    k = base
    while k < most and plt_if_lost(k) > limit:
        k *= 2
    return min(k, most)
