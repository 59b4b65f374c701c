"""What the MoE layers of one engine know of the step in progress."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal


@dataclass
class StepContext:
    """Shared by an engine and its layers.

    ``ghost``: the forward in progress only keeps this rank's collectives in step; its tokens reach no expert.
    ``phase``: statistics count in "forward"; in "backward" a forward is a recomputation and counts nothing.
    ``loss_scale``: factor between a micro-batch's loss and what is differentiated; attached losses follow it.
    ``export_experts``: whether state dicts contain the experts (for users) or not (inside the engine's own save).
    """

    ghost: bool = False
    phase: Literal["forward", "backward"] = "forward"
    loss_scale: float = 1.0
    export_experts: bool = True

    @contextmanager
    def dense_only(self) -> Iterator[None]:
        """State dicts taken or loaded inside leave the experts out."""
        self.export_experts = False
        try:
            yield
        finally:
            self.export_experts = True
