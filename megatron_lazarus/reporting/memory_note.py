"""Tells once, after the first forward, what dropless routing may cost before any backward runs."""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger("megatron_lazarus.engine")


class MemoryNote:
    """Call it after every forward of a step; ``experts``: an ExpertState."""

    def __init__(self) -> None:
        self._told = False

    def __call__(self, experts: Any) -> None:
        if self._told or not experts.layers:
            return
        self._told = True
        sizes = [layer.peak_activation_bytes(layer.tokens_in_last_forward) for layer in experts.layers]
        balanced, worst = (sum(size[index] for size in sizes) / 2**20 for index in range(2))
        if experts.rank == 0:
            logger.info(
                "expert activations per rank: %.1f MiB with balanced routing, at most %.1f MiB if every token of a "
                "micro-batch round came to one rank (bound it with lazarus.experts.max_tokens_per_expert_chunk)",
                balanced,
                worst,
            )
