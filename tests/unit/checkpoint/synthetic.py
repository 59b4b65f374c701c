"""Checkpoints of a small model that was never built, written with the product's writer: their content is known."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_lazarus.checkpoint.dense import SKELETON, pieces, shard_file, take_apart
from megatron_lazarus.checkpoint.files import write_atomically
from megatron_lazarus.checkpoint.image import FileImage
from megatron_lazarus.checkpoint.manifest import ExpertEntry, FileEntry, Manifest, PartEntry
from megatron_lazarus.checkpoint.safety import dump
from megatron_lazarus.checkpoint.writer import parts_of, record_file, write_image, write_part

EXPERT = {"up.weight": (6, 3), "up.bias": (6,), "down.weight": (3, 6)}
FIELDS = ("parameter", "master", "exp_avg", "exp_avg_sq", "step")
PREFIX = "block.{layer}.deepspeed_moe."


def record(layer: int, expert: int, step: int) -> dict[str, Tensor]:
    """bf16 parameters, fp32 master and moments; every value tells where it belongs."""
    generator = torch.Generator().manual_seed(step * 10_000 + layer * 100 + expert)
    tensors: dict[str, Tensor] = {}
    for name, shape in EXPERT.items():
        for one in FIELDS[1:-1]:
            tensors[f"{one}/{name}"] = torch.rand(shape, generator=generator)
        tensors[f"parameter/{name}"] = tensors[f"master/{name}"].bfloat16()
    return {**tensors, "step": torch.tensor([float(step)])}


def dense_state(layers: int, experts: int, step: int) -> dict[str, Any]:
    """What DeepSpeed keeps of the dense part in bf16 with torch's AdamW."""
    generator = torch.Generator().manual_seed(step)
    shapes = {"embed.weight": (5, 3)}
    for layer in range(layers):
        shapes[f"{PREFIX.format(layer=layer)}gate.wg.weight"] = (experts, 3)
    shapes["head.bias"] = (5,)
    masters = [torch.rand(shape, generator=generator) for shape in shapes.values()]
    state = {
        index: {
            "step": torch.tensor(float(step)),
            "exp_avg": torch.rand(shape, generator=generator),
            "exp_avg_sq": torch.rand(shape, generator=generator),
        }
        for index, shape in enumerate(shapes.values())
    }
    groups = [{"lr": 0.01, "weight_decay": 0.1, "params": list(range(len(shapes)))}]
    return {
        "module": {name: master.bfloat16() for name, master in zip(shapes, masters, strict=True)},
        "buffer_names": [],
        "optimizer": {
            "dynamic_loss_scale": False,
            "cur_scale": 1.0,
            "cur_iter": step,
            "optimizer_state_dict": {"state": state, "param_groups": groups},
            "fp32_groups": [masters],
        },
        "lr_scheduler": {"base_lrs": [0.01], "last_epoch": step},
        "skipped_steps": 0,
        "global_steps": step,
        "global_samples": 8 * step,
        "dp_world_size": 2,
        "mp_world_size": 1,
    }


@dataclass
class Saves:
    """A run that saves into ``directory``; every save refers to earlier ones for what it does not write."""

    directory: Path
    layers: int = 2
    experts: int = 4
    content: str = "all"
    parts: dict[tuple[int, int], dict[bool, PartEntry]] = field(default_factory=dict)

    def save(self, step: int, selected: Sequence[int]) -> str:
        """Write ``selected`` experts of every layer as of ``step``; returns the tag."""
        tag = f"global_step{step}"
        folder = self.directory / tag
        for name in ("experts", "dense"):
            os.makedirs(folder / name)
        for layer in range(self.layers):
            for expert in range(self.experts):
                tensors = record(layer, expert, step)
                for master, fields in parts_of(self.content, expert in selected, FIELDS):
                    chosen = {key: value for key, value in tensors.items() if key.partition("/")[0] in fields}
                    name = record_file(layer, expert, master=master)
                    part = write_part(
                        str(self.directory), tag, name, FileImage.of(chosen), step=step, tokens=float(step)
                    )
                    self.parts.setdefault((layer, expert), {})[master] = part
        skeleton, tensors = take_apart(dense_state(self.layers, self.experts, step))
        shard = write_image(str(folder), shard_file(0), FileImage.of(pieces(tensors, 1 << 20)))
        data = dump(skeleton)
        write_atomically(str(folder / SKELETON), data)
        experts = [ExpertEntry(*key, list(parts.values())) for key, parts in sorted(self.parts.items())]
        files = [shard, FileEntry(SKELETON, len(data), _sha256(data))]
        Manifest(tag, 1, step, self._model(step), files, self.content, experts).write(str(folder))
        write_atomically(str(self.directory / "latest"), tag.encode())
        return tag

    def _model(self, step: int) -> dict[str, Any]:
        module = dense_state(self.layers, self.experts, step)["module"]
        layer = {"num_experts": self.experts, "tensors": {name: list(shape) for name, shape in EXPERT.items()}}
        return {
            "dense": {name: list(tensor.shape) for name, tensor in module.items()},
            "moe_layers": [layer] * self.layers,
            "expert_optimizer_state": ["exp_avg", "exp_avg_sq"],
        }


def _sha256(data: bytes) -> str:
    import hashlib

    return hashlib.sha256(data).hexdigest()
