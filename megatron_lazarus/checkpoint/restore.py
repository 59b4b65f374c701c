"""Reads what writer.py wrote: records in any mix of parts, and the dense part. All is checked before it is used."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from torch import Tensor

from megatron_lazarus.checkpoint.dense import put_together
from megatron_lazarus.checkpoint.files import CheckpointError, read_checked
from megatron_lazarus.checkpoint.manifest import FileEntry, Manifest, PartEntry
from megatron_lazarus.checkpoint.safety import load


def read_record(save_dir: str, manifest: Manifest, layer: int, expert: int) -> dict[str, Tensor]:
    """All tensors of one expert's record, ``<field>/<tensor>`` and ``step``, on the CPU.

    Raises CheckpointError naming file and expert if a part is missing or damaged.
    """
    entry = manifest.record(layer, expert)
    record: dict[str, Tensor] = {}
    for part in entry.parts:
        tensors = _read(save_dir, part.tag, part, entry.what)
        if twice := sorted(record.keys() & tensors.keys()):
            raise CheckpointError(f"{entry.what}: {twice[0]!r} is in more than one file")
        record.update(tensors)
    return record


def read_dense(save_dir: str, manifest: Manifest, map_location: Any = "cpu") -> dict[str, Any]:
    """DeepSpeed's state dict of the dense part: ``module``, ``optimizer``, ``lr_scheduler``, counters, client state.

    Raises CheckpointError naming the file if one is missing or damaged. Executes no pickle.
    """
    tensors: dict[str, Tensor] = {}
    skeletons = []
    for entry in manifest.files:
        path = os.path.join(save_dir, manifest.tag, entry.name)
        if entry.name.endswith(".safetensors"):
            tensors.update(_read(save_dir, manifest.tag, entry, "dense part"))
        elif entry.name.endswith(".pt"):
            data = read_checked(path, entry.bytes, entry.sha256, "dense part")
            skeletons.append(load(data, path, map_location))
    if len(skeletons) != 1 or not isinstance(skeletons[0], dict):
        raise CheckpointError(f"{os.path.join(save_dir, manifest.tag)} has {len(skeletons)} dense states, not one")
    state: dict[str, Any] = put_together(skeletons[0], tensors, lambda tensor: tensor.to(map_location))
    return state


def fill_record(target: Mapping[str, Tensor], source: Mapping[str, Tensor], with_state: bool, what: str) -> None:
    """Fill a record's tensors from a file's, across float32, float64 and bf16 models.

    Weights come from the master copy where there is one; a master comes from the weights where there is none.
    ``with_state`` false: optimizer state and step count start at zero.
    """
    for name, tensor in target.items():
        field, _, rest = name.partition("/")
        if field in ("parameter", "master"):
            best = source.get(f"master/{rest}", source.get(f"parameter/{rest}"))
        elif not with_state and field != "buffer":
            tensor.zero_()
            continue
        else:
            best = source.get(name)
        if best is None:
            raise CheckpointError(f"{what}: the checkpoint has no {name!r} (of another optimizer or model?)")
        tensor.copy_(best)


def _read(save_dir: str, tag: str, entry: FileEntry | PartEntry, what: str) -> dict[str, Tensor]:
    path = os.path.join(save_dir, tag, entry.name)
    data = read_checked(path, entry.bytes, entry.sha256, what)
    try:
        return load_safetensors(data)
    except SafetensorError as error:
        raise CheckpointError(f"{path} is no safetensors file ({what}): {error}") from error
