"""How much of a run's wall time went into steps that committed."""

from __future__ import annotations

import time
from collections.abc import Sequence


class Goodput:
    """Seconds of committed steps, as one member counts them.

    ``productive_s``: sum over committed steps of the attempt that committed; what was begun and dropped, recoveries,
    evaluations and saves do not count. ``wall_s``: from the begin of the first committed step to the end of the last.
    """

    def __init__(self) -> None:
        self.productive_s = 0.0
        self._begin: float | None = None
        self._end = 0.0

    def step(self, seconds: float) -> None:
        """Count a step that has committed just now, after so long."""
        self._end = time.monotonic()
        self.productive_s += seconds
        if self._begin is None:
            self._begin = self._end - seconds

    @property
    def wall_s(self) -> float:
        return 0.0 if self._begin is None else self._end - self._begin

    @property
    def share(self) -> float:
        """Goodput, 0..1; 1 before the first step."""
        return self.productive_s / self.wall_s if self.wall_s > 0 else 1.0

    def since_begin(self) -> list[float]:
        """[productive seconds, seconds since the first step began], for ``adopt`` on another member."""
        return [self.productive_s, 0.0 if self._begin is None else time.monotonic() - self._begin]

    def adopt(self, counted: Sequence[float]) -> None:
        """Take over what a member that was there from the start has counted."""
        self.productive_s, ago = counted
        self._end = time.monotonic()
        self._begin = self._end - ago if ago else None

    def to_json(self) -> dict[str, float]:
        return {"productive_s": round(self.productive_s, 4), "wall_s": round(self.wall_s, 4)}


class Laps:
    """Seconds by phase of something that goes through several."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.monotonic()

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self.seconds[name] = now - self._last
        self._last = now
