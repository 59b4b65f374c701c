"""Activation recomputation that works on any device and around collectives."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

Result = TypeVar("Result")


def checkpointed(function: Callable[..., Result]) -> Callable[..., Result]:
    """Return ``function`` with its activations dropped after the forward and computed again for the backward.

    The state of the default generators is restored for the second run, so dropout repeats. Early stop is off: the
    second run goes to its end, and the collectives inside a MoE layer run in the same number and order on every rank,
    whatever tensors each of them still needs.
    """

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Result:
        with set_checkpoint_early_stop(False):
            return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=True, **kwargs)

    return run
