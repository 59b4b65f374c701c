"""Notices that loads have left what experts are placed for, so that nobody waits a whole interval with slow steps."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

PATIENCE = 2
"""Steps in a row that must be slower than foreseen: one odd batch is no drift."""

_MEMORY = 20
"""Steps over which is learnt how far single steps stray from what the mean load makes foresee."""

_DEVIATIONS = 2.0
"""So many standard deviations from what is usual are unusual."""

_STRAY = 0.1
"""What a step may always stray by. Beyond it, and three deviations, it teaches nothing: a jump is not usual."""

SPARED = 50
"""After a look before its time, this many times what it took (moving included) pass until the next: at most 2 %."""


class DriftWatch:
    """Compares, step by step on one rank, the busiest rank's tokens with those that the last look foresaw.

    Loads of single steps stray, so that the busiest rank mostly has more than with the mean load. What is usual of that
    is learnt as training goes on: only more than that is a drift.
    ``min_gain``: the part of a step's time that the difference must cost. ``now``: a clock in seconds.
    ``foreseen``: tokens of the busiest rank over the mean, all layers together, with the loads by which experts were
    placed; None: to be set before ``drifts``.
    """

    def __init__(self, min_gain: float, now: Callable[[], float] = time.monotonic) -> None:
        self._min_gain, self._now = min_gain, now
        self.foreseen: float | None = None
        self._steps = 0
        self._usual = self._variance = 0.0
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
        mean = max(float(shares[:, 1].sum()), 1.0)
        unusual = float(shares[:, 0].sum()) / mean - self.foreseen - self._usual
        slow = unusual * mean * seconds_per_token > self._min_gain * step_s
        deviation = math.sqrt(self._variance)
        self._steps = self._steps + 1 if slow and unusual > _DEVIATIONS * deviation else 0
        strayed = min(unusual, _STRAY + 3 * deviation)
        self._usual += strayed / _MEMORY
        self._variance += (strayed**2 - self._variance) / _MEMORY
        return self._steps >= PATIENCE and self._now() >= self._not_before
