"""The policy for steps whose loss cannot be used."""

from __future__ import annotations

import math

import pytest

from megatron_lazarus.config import GuardConfig
from megatron_lazarus.guard import LossGuard, StepRefused


def _see(guard: LossGuard, step: int, loss: float, norm: float = 1.0, finite: bool = True) -> str | None:
    return guard.refuses(step, loss, norm, finite, f"samples {step * 4}..{step * 4 + 3}")


def test_spikes_are_measured_against_recent_committed_losses() -> None:
    guard = LossGuard(GuardConfig(on_spike="skip", spike_factor=2.0, spike_window=3))
    assert _see(guard, 0, 100.0) is None, "no history, no spike"
    for step, loss in enumerate((4.0, 2.0, 3.0), start=1):
        assert _see(guard, step, loss) is None
    message = _see(guard, 4, 6.1)
    assert message is not None
    assert message.startswith("step 4: loss 6.1 is above 2.0 x 3")
    assert message.endswith("(samples 16..19)")
    assert _see(guard, 5, 6.0) is None, "exactly at the limit is no spike, and the skipped loss left no trace"
    assert guard.spiking_steps == 1


def test_spikes_are_ignored_by_default() -> None:
    guard = LossGuard(GuardConfig(spike_window=1))
    assert _see(guard, 0, 1.0) is None
    assert _see(guard, 1, 1e9) is None


@pytest.mark.parametrize("bad", [{"loss": math.nan}, {"norm": math.inf}, {"finite": False}])
def test_nonfinite_in_any_form(bad: dict[str, float]) -> None:
    guard = LossGuard(GuardConfig())
    message = _see(guard, 7, **{"loss": 1.0, **bad})  # type: ignore[arg-type]
    assert message is not None
    assert "not finite (samples 28..31)" in message
    with pytest.raises(StepRefused, match=r"step 7: .*samples 28\.\.31"):
        _see(LossGuard(GuardConfig(on_nonfinite="stop")), 7, **{"loss": 1.0, **bad})  # type: ignore[arg-type]


def test_too_many_skips_in_a_row_stop_the_run() -> None:
    guard = LossGuard(GuardConfig(max_consecutive_skips=2))
    for step in range(4):
        assert _see(guard, 3 * step, math.nan)
        assert _see(guard, 3 * step + 1, math.nan)
        assert _see(guard, 3 * step + 2, 1.0) is None, "a good step starts the count anew"
    _see(guard, 12, math.nan)
    _see(guard, 13, math.nan)
    with pytest.raises(StepRefused, match=r'3 skipped steps in a row .*"lazarus\.guard\.max_consecutive_skips" = 2'):
        _see(guard, 14, math.nan)
    assert guard.nonfinite_steps == 11
