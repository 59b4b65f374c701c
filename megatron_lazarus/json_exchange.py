"""Small JSON values between the ranks of the world: nothing that a peer sends is executed."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist

_FIRST = 1024
"""Bytes of every rank's message that travel at once with its length; what is longer takes a second round."""

_LENGTH = 8


def gather_json(value: Any) -> list[Any]:
    """Every rank's ``value``, by rank."""
    message = json.dumps(value).encode()
    start, rest = message[: _FIRST - _LENGTH], message[_FIRST - _LENGTH :]
    heads = _all_gather(len(message).to_bytes(_LENGTH, "little") + start, _FIRST)
    lengths = [int.from_bytes(head[:_LENGTH], "little") for head in heads]
    longest = max(lengths) - (_FIRST - _LENGTH)
    rests = _all_gather(rest, longest) if longest > 0 else [b""] * len(heads)
    return [
        json.loads((head[_LENGTH:] + more)[:length]) for head, more, length in zip(heads, rests, lengths, strict=True)
    ]


def _all_gather(data: bytes, size: int) -> list[bytes]:
    """Every rank's ``data``, which is at most ``size`` bytes, filled up to that."""
    mine = torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8).to(_device())
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine)
    return [part.cpu().numpy().tobytes() for part in parts]


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
