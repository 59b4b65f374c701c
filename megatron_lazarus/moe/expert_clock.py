"""Measures what experts cost per token, without waiting for a device."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

BACKWARD_COST = 2.0
"""Time of a backward over that of its forward: two matrix products, for inputs and for weights, instead of one."""


class ExpertClock:
    """Seconds and tokens of the expert forwards of one layer on one rank."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._tokens = 0
        self._spans: list[tuple[Any, Any]] = []

    @contextmanager
    def running(self, rows: Tensor) -> Iterator[None]:
        """Count what runs inside for ``rows`` [tokens, hidden]."""
        self._tokens += rows.shape[0]
        if rows.device.type == "cpu":
            start = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - start
            return
        begin, end = (torch.Event(rows.device, enable_timing=True) for _ in range(2))
        begin.record()
        yield
        end.record()
        self._spans.append((begin, end))

    def take(self) -> tuple[float, int]:
        """(seconds, tokens) since the last call. To be called when the device has done what was measured."""
        for begin, end in self._spans:
            end.synchronize()
            self._seconds += begin.elapsed_time(end) / 1000
        taken = self._seconds, self._tokens
        self._seconds, self._tokens, self._spans = 0.0, 0, []
        return taken
