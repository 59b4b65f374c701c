"""Notices that loads have left what experts are placed for, so that nobody waits a whole interval with slow steps."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

PATIENCE = 2
"""Steps in a row that must be slower than foreseen: one odd batch is no drift."""

SPARED = 50
"""After a look before its time, this many times what it took (moving included) pass until the next: at most 2 %."""


class DriftWatch:
    """Compares, step by step on one rank, the busiest rank's tokens with those that the last look foresaw.

    ``min_gain``: the part of a step's time that the difference must cost. ``now``: a clock in seconds.
    ``foreseen``: tokens of the busiest rank over the mean, all layers together, with the loads by which experts were
    placed; None: to be set before ``drifts``.
    """

    def __init__(self, min_gain: float, now: Callable[[], float] = time.monotonic) -> None:
        self._min_gain, self._now = min_gain, now
        self.foreseen: float | None = None
        self._steps = 0
        self._not_before = -math.inf

    def begin(self) -> None:
        """Experts have just been placed, or left where they are."""
        self.foreseen, self._steps = None, 0

    def looked(self, seconds: float) -> None:
        """A look before its time took so long."""
        self._not_before = self._now() + SPARED * seconds

    def drifts(self, shares: npt.NDArray[np.float64], seconds_per_token: float, step_s: float) -> bool:
        """Whether to look at once. ``shares`` [layers, 2]: the step's tokens of the busiest rank, and the mean.

        Raises RuntimeError if nothing is foreseen.
        """
        if self.foreseen is None:
            raise RuntimeError("there is nothing to compare with: set what is foreseen")
        lost_s = (shares[:, 0].sum() - self.foreseen * shares[:, 1].sum()) * seconds_per_token
        self._steps = self._steps + 1 if lost_s > self._min_gain * step_s else 0
        return self._steps >= PATIENCE and self._now() >= self._not_before
