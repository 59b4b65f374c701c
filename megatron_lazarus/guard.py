"""Which steps are usable: the policy for non-finite and spiking losses, decided alike on every rank."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

from megatron_lazarus.config import GuardConfig


class StepRefused(RuntimeError):
    """A step that the configuration says must stop the run."""


class LossGuard:
    """Sees each step's global loss and gradient norm before it is committed.

    Its memory (recent losses, skips in a row) follows from the committed steps alone, so every rank agrees.
    """

    def __init__(self, config: GuardConfig) -> None:
        self._config = config
        self._recent: deque[float] = deque(maxlen=config.spike_window)
        self.consecutive_skips = 0
        self.nonfinite_steps = 0
        self.spiking_steps = 0

    def refuses(self, step: int, loss: float, grad_norm: float, finite: bool, samples: str) -> str | None:
        """Why the step must be skipped, or None to commit it. Raises StepRefused where the policy is to stop."""
        reason = self._reason(loss, grad_norm, finite)
        if reason is None:
            self.consecutive_skips = 0
            self._recent.append(loss)
            return None
        message = f"step {step}: {reason[1]} ({samples})"
        if reason[0] == "stop":
            raise StepRefused(message)
        self.consecutive_skips += 1
        if self.consecutive_skips > self._config.max_consecutive_skips:
            raise StepRefused(
                f"{message}; {self.consecutive_skips} skipped steps in a row are more than "
                f'"lazarus.guard.max_consecutive_skips" = {self._config.max_consecutive_skips}'
            )
        return message

    def state(self) -> dict[str, Any]:
        """What ``restore`` needs on another rank."""
        return {
            "recent": list(self._recent),
            "consecutive_skips": self.consecutive_skips,
            "nonfinite_steps": self.nonfinite_steps,
            "spiking_steps": self.spiking_steps,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self._recent = deque(state["recent"], maxlen=self._config.spike_window)
        self.consecutive_skips = state["consecutive_skips"]
        self.nonfinite_steps = state["nonfinite_steps"]
        self.spiking_steps = state["spiking_steps"]

    def _reason(self, loss: float, grad_norm: float, finite: bool) -> tuple[str, str] | None:
        if not finite or not math.isfinite(loss) or not math.isfinite(grad_norm):
            self.nonfinite_steps += 1
            return self._config.on_nonfinite, f"loss {loss} or gradient norm {grad_norm} is not finite"
        if self._config.on_spike != "ignore" and len(self._recent) == self._config.spike_window:
            mean = sum(self._recent) / len(self._recent)
            if loss > self._config.spike_factor * mean:
                self.spiking_steps += 1
                return self._config.on_spike, (
                    f"loss {loss:.6g} is above {self._config.spike_factor} x {mean:.6g}, the mean of the last "
                    f"{self._config.spike_window} steps"
                )
        return None
