"""The dense part as tensors that several ranks share in writing, and a small rest that one of them writes.

``take_apart`` replaces the tensors of a nested state by marks; ``put_together`` undoes it. What remains is plain
values, written by ``torch.save`` and loaded with ``weights_only``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from megatron_lazarus.checkpoint.files import CheckpointError
from megatron_lazarus.checkpoint.image import TYPES

MARK = "lazarus tensor"
SKELETON = "mp_rank_00_model_states.pt"
"""The file of the rest has the name of DeepSpeed's file, which in older checkpoints holds the tensors themselves."""


def shard_file(rank: int, suffix: str = "") -> str:
    """The file of the dense tensors that one rank writes, relative to the tag directory."""
    return f"dense/rank_{rank}{suffix}.safetensors"


def take_apart(state: Any) -> tuple[Any, dict[str, Tensor]]:
    """(the state with marks in place of its tensors, the tensors by name).

    Tensors of one element stay where they are, copied, and so do types that safetensors does not know; one that occurs
    twice is taken once.
    """
    tensors: dict[str, Tensor] = {}
    seen: dict[tuple[Any, ...], str] = {}

    def walk(value: Any, path: str) -> Any:
        if isinstance(value, Tensor):
            value = value.detach()
            if value.numel() <= 1 or value.layout != torch.strided or value.dtype not in TYPES:
                return value.clone()
            key = (value.data_ptr(), value.dtype, value.shape, value.stride(), value.device)
            if key not in seen:
                seen[key] = path if path not in tensors else f"{path}~{len(tensors)}"
                tensors[seen[key]] = value
            return {MARK: seen[key], "shape": list(value.shape)}
        if isinstance(value, OrderedDict):
            return OrderedDict((key, walk(item, f"{path}/{key}")) for key, item in value.items())
        if isinstance(value, dict):
            return {key: walk(item, f"{path}/{key}") for key, item in value.items()}
        if type(value) in (list, tuple):
            return type(value)(walk(item, f"{path}/{index}") for index, item in enumerate(value))
        return value

    return walk(state, ""), tensors


def pieces(tensors: Mapping[str, Tensor], limit: int) -> dict[str, Tensor]:
    """Flat pieces of at most ``limit`` bytes, named ``<tensor>#<index>``: so that no rank gets more than its share."""
    result = {}
    for name, tensor in tensors.items():
        flat = tensor.reshape(-1)
        length = max(1, limit // flat.element_size())
        for index, start in enumerate(range(0, flat.numel(), length)):
            result[f"{name}#{index}"] = flat[start : start + length]
    return result


def put_together(skeleton: Any, read: Mapping[str, Tensor], place: Callable[[Tensor], Tensor] = lambda t: t) -> Any:
    """The state of which ``take_apart`` and ``pieces`` made ``skeleton`` and ``read``.

    ``place`` moves tensors to their device. Raises CheckpointError if a tensor is missing or has another size.
    """
    by_tensor: dict[str, dict[int, Tensor]] = {}
    for key, piece in read.items():
        name, _, index = key.rpartition("#")
        by_tensor.setdefault(name, {})[int(index)] = piece
    built: dict[str, Tensor] = {}

    def build(name: str, shape: list[int]) -> Tensor:
        if name not in built:
            found = by_tensor.get(name, {})
            flat = [found[index] for index in sorted(found)]
            count = sum(piece.numel() for piece in flat)
            if count != torch.Size(shape).numel() or sorted(found) != list(range(len(found))):
                raise CheckpointError(f"dense tensor {name!r} has {count} elements in the files, its shape is {shape}")
            built[name] = place((torch.cat(flat) if len(flat) > 1 else flat[0]).view(shape))
        return built[name]

    def walk(value: Any) -> Any:
        if isinstance(value, dict) and MARK in value:
            return build(value[MARK], value["shape"])
        if isinstance(value, OrderedDict):
            return OrderedDict((key, walk(item)) for key, item in value.items())
        if isinstance(value, dict):
            return {key: walk(item) for key, item in value.items()}
        if type(value) in (list, tuple):
            return type(value)(walk(item) for item in value)
        return value

    return walk(skeleton)
