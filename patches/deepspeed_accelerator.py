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


def _lists_float64(original: Any) -> bool:
    return any(dtype == torch.float64 for dtype in original(_WithoutFloat16()))


class _WithoutFloat16:
    """As much of an accelerator as the question needs."""

    def is_fp16_supported(self) -> bool:
        return False


CPU_FLOAT64 = Patch(
    target="deepspeed.accelerator.cpu_accelerator:CPU_Accelerator.supported_dtypes",
    kind="wrap",
    make=_with_float64,
    reason="float64 models, by which trajectories are checked to 1e-9, stop at an assertion in gradient reduction: "
    "split_half_float_double_sparse (runtime/engine.py) promises double by its name, and the CPU accelerator's list of "
    "types leaves it out",
    upstream="https://github.com/deepspeedai/DeepSpeed/pull/7950, whose review notes that the lists leave double out",
    remove_when="CPU_Accelerator.supported_dtypes lists torch.float64",
    distribution="deepspeed",
    versions=">=0.18.9,<0.20",
    signature="(self)",
    fingerprints={"0.18.9": "f2207090a3a898ec", "0.19.8": "f2207090a3a898ec"},
    already_in=_lists_float64,
)
