"""Finds nodes for which the others wait, and says so. Nothing is done about them: slow is not dead."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_lazarus.expert_state import ExpertState

logger = logging.getLogger(__name__)

SLOW_SHARE = 0.2
"""A node is slow when the others wait for it this share of a step, and no more when that has halved."""

_MEMORY = 0.95
_LEAST_STEPS = 40


@dataclass(frozen=True)
class Straggler:
    """``share``: part of a step that the others wait for the node. ``slow``: False when that is over."""

    node: int
    share: float
    slow: bool


class Stragglers:
    """Watches the nodes of one generation. ``rank_nodes`` [ranks] numbers each rank's node."""

    def __init__(self, rank_nodes: Sequence[int]) -> None:
        self._node_of = np.asarray(rank_nodes)
        self._nodes = np.unique(self._node_of)
        self._waited = np.zeros(len(self._node_of))
        self._weight = 0.0
        self._steps = 0
        self._slow: set[int] = set()

    def update(self, seconds: float, waited: Sequence[float]) -> list[Straggler]:
        """What has changed with a step that took ``seconds``, of which each rank ``waited`` [ranks] for others.

        A node is behind by what the median rank of the other nodes waits more than its own rank that waits least, in
        the mean of recent steps.
        """
        if len(self._nodes) < 2 or seconds <= 0:
            return []
        self._waited = self._waited * _MEMORY + np.asarray(waited) / seconds
        self._weight = self._weight * _MEMORY + 1.0
        self._steps += 1
        changes = []
        for node in self._nodes.tolist():
            own, others = self._waited[self._node_of == node], self._waited[self._node_of != node]
            share = float((np.median(others) - own.min()) / self._weight)
            if node not in self._slow and self._steps >= _LEAST_STEPS and share > SLOW_SHARE:
                self._slow.add(node)
                changes.append(Straggler(node, share, True))
            elif node in self._slow and share < SLOW_SHARE / 2:
                self._slow.discard(node)
                changes.append(Straggler(node, share, False))
        return changes


class StragglerReports:
    """Called with the seconds each rank has waited in a step: tells log and events file of nodes that are slow.

    ``event(kind, **fields)`` adds to the events file; ``names`` [nodes] are the nodes' names; ``experts`` tell how many
    tokens each rank processes, since a node may be slow because it has more to do.
    """

    def __init__(
        self,
        event: Callable[..., None],
        names: Sequence[str],
        rank_nodes: Sequence[int],
        experts: ExpertState,
    ) -> None:
        self._event, self._names, self._node_of, self._experts = event, names, np.asarray(rank_nodes), experts
        self._stragglers = Stragglers(rank_nodes)
        self._before: float | None = None

    def __call__(self, waited: Sequence[float]) -> None:
        now = time.monotonic()
        before, self._before = self._before, now
        # How long the first step of a generation takes says little of the nodes.
        if before is None:
            return
        for straggler in self._stragglers.update(now - before, waited):
            name = self._names[straggler.node]
            if not straggler.slow:
                logger.warning("node %s is not slow any more", name)
                self._event("not slow", slow_node=name, share=round(straggler.share, 3))
                continue
            tokens = self._experts.rank_tokens()
            load = float(tokens[self._node_of == straggler.node].max() / tokens.mean())
            text = "node %s is slow: they wait for it %.0f %% of a step; it processes up to %.2f x the mean tokens"
            logger.warning(text, name, 100 * straggler.share, load)
            self._event("slow", slow_node=name, share=round(straggler.share, 3), load=round(load, 3))
