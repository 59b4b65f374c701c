"""What goes into a model's forward, and what is summed of what comes out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def add_values(sums: dict[str, Tensor], values: dict[str, Tensor], ghost: bool) -> None:
    """Add a micro-batch's values to the sums; a ghost's weigh nothing."""
    for name, value in values.items():
        term = value.detach().double() * (0.0 if ghost else 1.0)
        sums[name] = sums[name] + term if name in sums else term


def to_device(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, Mapping):
        return {key: to_device(item, device) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(to_device(item, device) for item in value)
    return value
