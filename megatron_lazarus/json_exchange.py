"""Small JSON values between the ranks of the world: nothing that a peer sends is executed."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist


def gather_json(value: Any) -> list[Any]:
    """Every rank's ``value``, by rank."""
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(_device())
    world = dist.get_world_size()
    sizes = [torch.zeros(1, dtype=torch.int64, device=data.device) for _ in range(world)]
    dist.all_gather(sizes, torch.tensor([data.numel()], device=data.device))
    padded = data.new_zeros(max(int(size) for size in sizes))
    padded[: data.numel()] = data
    parts = [torch.empty_like(padded) for _ in range(world)]
    dist.all_gather(parts, padded)
    return [json.loads(part[: int(size)].cpu().numpy().tobytes()) for part, size in zip(parts, sizes, strict=True)]


def broadcast_json(value: Any, source: int) -> Any:
    """``value`` of rank ``source``, on every rank."""
    return gather_json(value if dist.get_rank() == source else None)[source]


def broadcast_bytes(data: bytes | None, source: int) -> bytes:
    """``data`` of rank ``source``, on every rank; the others pass None."""
    size = broadcast_json(None if data is None else len(data), source)
    device = _device()
    if data is None:
        values = torch.empty(size, dtype=torch.uint8, device=device)
    else:
        values = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    dist.broadcast(values, source)
    return values.cpu().numpy().tobytes()


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
