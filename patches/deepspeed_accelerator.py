"""Overrides in ``deepspeed.accelerator.cpu_accelerator``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron_lazarus.patches.registry import Patch


def _with_float64(original: Callable[[Any], list[torch.dtype]]) -> Callable[[Any], list[torch.dtype]]:
    def supported_dtypes(self: Any) -> list[torch.dtype]:
        dtypes = original(self)
        return dtypes if torch.float64 in dtypes else [*dtypes, torch.float64]

    return supported_dtypes


CPU_FLOAT64 = Patch(
    target="deepspeed.accelerator.cpu_accelerator:CPU_Accelerator.supported_dtypes",
    kind="wrap",
    make=_with_float64,
    reason="float64 models, by which trajectories are checked to 1e-9, stop at an assertion in gradient reduction",
    upstream="deepspeed 0.19.8, runtime/engine.py split_half_float_double_sparse: its name promises double, the CPU "
    "accelerator's list of types leaves it out",
    remove_when="CPU_Accelerator.supported_dtypes lists torch.float64",
    distribution="deepspeed",
    signature="(self)",
)
