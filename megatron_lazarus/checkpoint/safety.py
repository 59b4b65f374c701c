"""What a checkpoint may hold: nothing that could only be loaded by running a pickle."""

from __future__ import annotations

import argparse
import io
import pickle
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch

from megatron_lazarus.checkpoint.files import CheckpointError

_SAFE_TYPES = (type(None), bool, int, float, str, bytes, torch.Tensor, torch.Size, torch.dtype, torch.device)
_SAFE_GLOBALS: list[Any] = [argparse.Namespace]


def refuse_unsafe(value: Any, path: str) -> None:
    """Raise CheckpointError, naming the key, for anything that ``weights_only`` loading would reject."""
    if isinstance(value, Mapping):
        if type(value) not in (dict, OrderedDict) and not type(value).__module__.startswith("collections"):
            raise CheckpointError(f"{path} is a {type(value).__qualname__}; use a dict")
        for key, item in value.items():
            refuse_unsafe(item, f"{path}[{key!r}]")
    elif isinstance(value, (list, tuple, set)) and type(value) in (list, tuple, set, torch.Size):
        for index, item in enumerate(value):
            refuse_unsafe(item, f"{path}[{index}]")
    elif isinstance(value, argparse.Namespace):
        refuse_unsafe(vars(value), path)
    elif not isinstance(value, _SAFE_TYPES):
        raise CheckpointError(
            f"{path} is a {type(value).__module__}.{type(value).__qualname__}, which could only be loaded by running "
            "a pickle; save plain values, tensors, lists, dicts or argparse.Namespace"
        )


def dump(value: Any) -> bytes:
    """``value`` as ``load`` takes it."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def load(data: bytes, path: str, map_location: Any = "cpu") -> Any:
    """The value that ``torch.save`` wrote to ``path``. Raises CheckpointError for what needs a pickle to be run."""
    try:
        with torch.serialization.safe_globals(_SAFE_GLOBALS):
            return torch.load(io.BytesIO(data), map_location=map_location, weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path} cannot be loaded with weights_only: {error}") from error
