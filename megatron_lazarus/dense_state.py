"""The dense part of an engine as bytes: what a rank without state needs from one that has it."""

from __future__ import annotations

import argparse
import io
from typing import Any

import torch

_COUNTERS = ("global_steps", "global_samples", "skipped_steps")


def pack(engine: Any) -> bytes:
    """Module (without experts), optimizer, schedule, counters, guard and loads of one rank."""
    ds_engine = engine.deepspeed_engine
    scheduler = ds_engine.lr_scheduler
    with engine.experts.context.dense_only():
        module = ds_engine.module.state_dict()
    state = {
        "module": module,
        "optimizer": ds_engine.optimizer.state_dict(),
        "scheduler": scheduler.state_dict() if scheduler is not None else None,
        "counters": {name: getattr(ds_engine, name) for name in _COUNTERS},
        "guard": engine.guard.state(),
        "loads": [torch.from_numpy(load) for load in engine.experts.loads],
        "counted": engine.experts.counted,
        "script": engine.script_loop.counters(),
    }
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def unpack(data: bytes, engine: Any) -> None:
    """Take over what ``pack`` gave on another rank. Executes no pickle."""
    ds_engine = engine.deepspeed_engine
    safe: list[Any] = [argparse.Namespace]
    with torch.serialization.safe_globals(safe):
        state = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    with engine.experts.context.dense_only():
        ds_engine.module.load_state_dict(state["module"])
    ds_engine.optimizer.load_state_dict(state["optimizer"])
    if ds_engine.lr_scheduler is not None:
        ds_engine.lr_scheduler.load_state_dict(state["scheduler"])
    for name, value in state["counters"].items():
        setattr(ds_engine, name, value)
    engine.guard.restore(state["guard"])
    engine.experts.loads = [load.numpy() for load in state["loads"]]
    engine.experts.counted = state["counted"]
    engine.script_loop.adopt(state["script"])
