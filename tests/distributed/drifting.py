"""Routers whose load is what a test says it is, and how evenly a plan would share it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_lazarus.moe.gating import DROPPED, Routes
from megatron_lazarus.planning.plan import Plan
from tests.unit.moe.test_balanced_split import least_maximum

Shares = Callable[[int], np.ndarray]
"""step -> share of the tokens that each expert gets [experts], sum 1."""


def moving(experts: int, every: int, skew: float = 8.0) -> Shares:
    """One expert gets ``skew`` times what each other one gets; every so many steps it is another one."""

    def shares(step: int) -> np.ndarray:
        weights = np.ones(experts)
        weights[(3 * (step // every)) % experts] = skew
        return weights / weights.sum()

    return shares


def on_two(experts: int, share: float = 0.87) -> Shares:
    """Two experts get ``share`` of all tokens together."""
    weights = np.full(experts, (1 - share) / (experts - 2))
    weights[[1, experts - 2]] = share / 2
    return lambda step: weights


def force(engine: Any, shares: Shares, layer_shift: int = 1) -> None:
    """Route tokens of every layer by ``shares`` from now on; layer l's experts are shifted by l * ``layer_shift``.

    Which token goes where depends on its place in its micro-batch only, so not on the placement of experts.
    """
    for index, layer in enumerate(engine.experts.layers):
        gate = layer.gate
        original = gate.forward

        def forward(tokens: Tensor, used: Any = None, original: Any = original, shift: int = index) -> Routes:
            routes = original(tokens, used)
            share = np.roll(shares(engine.global_steps), shift * layer_shift)
            count = tokens.shape[0]
            # A stride that shares no factor with the number of tokens mixes the experts along the sequence.
            places = (np.arange(count) * 7919 % count + 0.5) / count
            chosen = torch.from_numpy(np.searchsorted(np.cumsum(share), places).clip(0, len(share) - 1))
            first = torch.where(routes.experts[:, :1] == DROPPED, DROPPED, chosen.unsqueeze(1))
            return replace(routes, experts=torch.cat([first, routes.experts[:, 1:]], dim=1))

        gate.forward = forward


def unevenness(plan: Plan, share: np.ndarray, layer_shift: int = 1) -> float:
    """Tokens of the busiest rank over the mean, in the mean of the layers, if replicas share an expert equally."""
    found = []
    for index, placement in enumerate(plan.layers):
        tokens = np.roll(share, index * layer_shift)
        ranks = np.zeros(plan.world_size)
        for expert, count in enumerate(tokens):
            slots = [(rank, row.count(expert)) for rank, row in enumerate(placement.slots) if expert in row]
            for rank, held in slots:
                ranks[rank] += count * held / sum(number for _, number in slots)
        found.append(ranks.max() / ranks.mean())
    return float(np.mean(found))


def least_unevenness(plan: Plan, share: np.ndarray, layer_shift: int = 1) -> float:
    """The same if replicas share an expert in the best way, by linear programming."""
    found = [
        least_maximum(np.roll(share, index * layer_shift), placement.replica_counts()) * plan.world_size
        for index, placement in enumerate(plan.layers)
    ]
    return float(np.mean(found))
