"""The lines that a training run prints, in the form that Megatron users' tools read."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist


class Progress:
    """Collects the results of the steps since the last line."""

    def __init__(self, args: argparse.Namespace, tera_flops_per_step: float) -> None:
        self._args = args
        self._tera_flops_per_step = tera_flops_per_step
        self._skipped = self._not_finite = 0
        self._clear()

    def add(self, result: Any) -> None:
        """Take in one step: ``loss``, ``metrics``, ``grad_norm``, ``skipped``."""
        self._steps += 1
        self._grad_norm = result.grad_norm
        self._skipped += bool(result.skipped)
        if not math.isfinite(result.loss):
            self._not_finite += 1
        elif not result.skipped:
            self._counted += 1
            for name, value in result.metrics.items():
                self._sums[name] = self._sums.get(name, 0.0) + float(value)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave what runs inside out of the time per iteration."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._since += time.perf_counter() - start

    def line(self, iteration: int, learning_rate: float, world_size: int, goodput: float | None = None) -> str:
        """Return the line for the steps since the last one, and start anew.

        Losses are means over those steps, times are seconds of wall clock or as named; skipped and not-finite
        iterations are counted since the last line too; ``goodput`` is of the whole run, as the engine says.
        """
        args = self._args
        seconds = max((time.perf_counter() - self._since) / max(1, self._steps), 1e-9)
        samples = args.global_batch_size
        parts = [
            f" iteration {iteration:8d}/{args.train_iters:8d}",
            f"consumed samples: {iteration * samples:12d}",
            f"consumed tokens: {iteration * samples * args.seq_length:12d}",
            f"elapsed time per iteration (ms): {seconds * 1000:.1f}",
            f"learning rate: {learning_rate:.3E}",
            f"global batch size: {samples:5d}",
            *(f"{name}: {value / max(1, self._counted):.6E}" for name, value in self._sums.items()),
            f"grad norm: {self._grad_norm:.3f}",
            f"number of skipped iterations: {self._skipped:3d}",
            f"number of nan iterations: {self._not_finite:3d}",
            f"samples per second: {samples / seconds:.3f}",
            f"tokens per gpu per second (tgs): {samples * args.seq_length / seconds / world_size:.3f}",
            f"TFLOPs: {self._tera_flops_per_step / seconds / world_size:.2f}",
            *([] if goodput is None else [f"goodput: {goodput:.4f}"]),
        ]
        self._skipped = self._not_finite = 0
        self._clear()
        return " | ".join(parts) + " |"

    def _clear(self) -> None:
        self._steps = self._counted = 0
        self._grad_norm = 0.0
        self._sums: dict[str, float] = {}
        self._since = time.perf_counter()


def validation_lines(where: str, loss: float) -> list[str]:
    """Return the lines for a loss (nats per token) of held-out text; ``where`` names iteration and split."""
    text = f" validation loss at {where} | lm loss value: {loss:.6E} | lm loss PPL: {math.exp(min(20.0, loss)):.6E} | "
    rule = "-" * (len(text) + 1)
    return [rule, text, rule]


def on_rank_zero(line: str) -> None:
    """Print ``line`` once in the job."""
    if dist.get_rank() == 0:
        print(line, flush=True)
