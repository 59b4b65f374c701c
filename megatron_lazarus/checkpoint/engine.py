"""Plain checkpoints: DeepSpeed writes the dense part, every expert record is a safetensors file of its own.

A tag directory holds DeepSpeed's files, ``experts/layer_<l>_expert_<e>.safetensors`` and ``manifest.json``. Publish
order: files, fsync, manifest, fsync, atomic replace of ``latest``.
"""

from __future__ import annotations

import argparse
import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_lazarus.checkpoint.manifest import (
    CheckpointError,
    FileEntry,
    Manifest,
    fsync_path,
    read_latest,
    write_atomically,
)

logger = logging.getLogger(__name__)

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


class SafeCheckpointEngine(TorchCheckpointEngine):  # type: ignore[misc]
    """DeepSpeed's dense files: flushed to storage when saved, loaded without executing pickles."""

    def save(self, state_dict: Any, path: str) -> None:
        refuse_unsafe(state_dict, "checkpoint")
        super().save(state_dict, path)
        fsync_path(path)

    def load(self, path: str, map_location: Any = None) -> Any:
        with torch.serialization.safe_globals(_SAFE_GLOBALS):
            return torch.load(path, map_location=map_location, weights_only=True)


class Experts(Protocol):
    """What is saved and loaded: the records of this rank and where all records are."""

    layers: Sequence[Any]
    buffers: list[Any]
    context: Any
    rank: int

    @property
    def plan(self) -> Any: ...


class ExpertCheckpoint:
    """Saves and loads the whole model of one engine: dense part through DeepSpeed, experts by record.

    ``newest`` is the tag directory last saved or loaded here. ``may_publish`` is asked on rank 0 before a tag becomes
    complete: a member of an old ``generation`` must not publish.
    """

    def __init__(self, ds_engine: Any, experts: Experts) -> None:
        self._engine, self._experts = ds_engine, experts
        self.newest: str | None = None
        self.generation: Callable[[], int] = lambda: 0
        self.may_publish: Callable[[], bool] = lambda: True
        ds_engine.checkpoint_engine = SafeCheckpointEngine(ds_engine._config)

    # -- save ---------------------------------------------------------------------------------------------------

    def save(
        self,
        save_dir: str,
        tag: str | None,
        client_state: Mapping[str, Any],
        save_latest: bool,
        without_frozen: bool,
        again: bool = False,
    ) -> bool:
        """Write and publish a tag. ``again``: this rank has tried before, at this step, and a rank was lost."""
        refuse_unsafe(client_state, "client_state")
        tag = str(tag) if tag is not None else f"global_step{self._engine.global_steps}"
        directory = os.path.join(save_dir, tag)
        # What may be published already must not be written over: it could be the only complete one.
        # A rank that was still at what came before has not tried yet.
        if not (any(self._gather(again)) and self._is_complete(directory)):
            self._write(save_dir, directory, tag, client_state, without_frozen)
        if self._experts.rank == 0 and save_latest:
            write_atomically(os.path.join(save_dir, "latest"), tag.encode())
        if self._experts.plan.world_size > 1:
            dist.barrier()
        self.newest = directory
        return True

    def _is_complete(self, directory: str) -> bool:
        """Whether rank 0 finds the tag complete and undamaged, of this step."""
        complete = False
        if self._experts.rank == 0:
            try:
                manifest = Manifest.read(directory)
                manifest.verify(directory)
                complete = manifest.global_steps == self._engine.global_steps and self.may_publish()
            except CheckpointError as error:
                logger.info("the interrupted checkpoint is written again: %s", error)
        return any(self._gather(complete))

    def _write(
        self, save_dir: str, directory: str, tag: str, client_state: Mapping[str, Any], without_frozen: bool
    ) -> None:
        experts = os.path.join(directory, "experts")
        if self._experts.rank == 0:
            os.makedirs(experts, exist_ok=True)
        with self._experts.context.dense_only():
            # Its barriers also make the directory visible to every rank before experts are written.
            self._engine.save_checkpoint(
                save_dir,
                tag=tag,
                client_state=dict(client_state),
                save_latest=False,
                exclude_frozen_parameters=without_frozen,
            )
        mine = [self._write_expert(directory, layer, expert) for layer, expert in self._my_share()]
        entries = [entry for part in self._gather(mine) for entry in part]
        if self._experts.rank == 0:
            dense = [
                FileEntry.of(directory, name)
                for name in sorted(os.listdir(directory))
                if os.path.isfile(os.path.join(directory, name)) and name.endswith(".pt")
            ]
            fsync_path(experts)
            manifest = Manifest(
                tag=tag,
                generation=self.generation(),
                global_steps=self._engine.global_steps,
                model=self._model_description(),
                files=sorted([*entries, *dense], key=lambda entry: entry.name),
            )
            if not self.may_publish():
                raise CheckpointError(
                    f"{directory} is not published: a newer generation than {manifest.generation} runs"
                )
            manifest.write(directory)

    def _my_share(self) -> list[tuple[int, int]]:
        """(layer, expert) that this rank writes: each goes to the holder with the fewest bytes so far."""
        written = [0] * self._experts.plan.world_size
        mine = []
        for layer, (placement, buffer) in enumerate(zip(self._experts.plan.layers, self._experts.buffers, strict=True)):
            for expert in range(placement.num_experts):
                writer = min(placement.holders(expert), key=lambda rank: (written[rank], rank))
                written[writer] += buffer.layout.nbytes
                if writer == self._experts.rank:
                    mine.append((layer, expert))
        return mine

    def _write_expert(self, directory: str, layer: int, expert: int) -> FileEntry:
        buffer = self._experts.buffers[layer]
        slot = buffer.first_slots()[expert]
        tensors = {name: tensor.cpu().contiguous() for name, tensor in buffer.named_tensors(slot).items()}
        name = _expert_file(layer, expert)
        path = os.path.join(directory, name)
        save_file(tensors, path)
        fsync_path(path)
        return FileEntry.of(directory, name)

    def _gather(self, mine: Any) -> list[Any]:
        if self._experts.plan.world_size == 1:
            return [mine]
        parts: list[Any] = [None] * self._experts.plan.world_size
        dist.all_gather_object(parts, mine)
        return parts

    def _model_description(self) -> dict[str, Any]:
        """Names and shapes by which a checkpoint of another model is told."""
        dense = {name: list(p.shape) for name, p in self._engine.module.named_parameters()}
        layers = [
            {
                "num_experts": layer.num_experts,
                "tensors": {spec.name: list(spec.shape) for spec in buffer.layout.tensors},
            }
            for layer, buffer in zip(self._experts.layers, self._experts.buffers, strict=True)
        ]
        state = sorted({name for buffer in self._experts.buffers for name in buffer.layout.state_names})
        return {"dense": dense, "moe_layers": layers, "expert_optimizer_state": state}

    # -- load ---------------------------------------------------------------------------------------------------

    def load(
        self,
        load_dir: str,
        tag: str | None,
        *,
        load_module_strict: bool,
        load_optimizer_states: bool,
        load_lr_scheduler_states: bool,
        load_module_only: bool,
        custom_load_fn: Any,
    ) -> tuple[str | None, dict[str, Any] | None]:
        tag = str(tag) if tag is not None else read_latest(load_dir)
        if tag is None:
            logger.warning("no checkpoint in %s: there is no file 'latest'", load_dir)
            return None, None
        directory = os.path.join(load_dir, tag)
        manifest = Manifest.read(directory)
        with_state = load_optimizer_states and not load_module_only
        self._check_model(manifest, directory, with_state)
        manifest.verify(directory)
        with self._experts.context.dense_only():
            path, client_state = self._engine.load_checkpoint(
                load_dir,
                tag=tag,
                load_module_strict=load_module_strict,
                load_optimizer_states=load_optimizer_states,
                load_lr_scheduler_states=load_lr_scheduler_states,
                load_module_only=load_module_only,
                custom_load_fn=custom_load_fn,
            )
        for layer, buffer in enumerate(self._experts.buffers):
            for slot, expert in enumerate(buffer.experts):
                tensors = load_file(os.path.join(directory, _expert_file(layer, expert)))
                restore_record(buffer.named_tensors(slot), tensors, with_state, f"layer {layer} expert {expert}")
        self.newest = directory
        return path, client_state

    def read_record(self, directory: str, layer: int, expert: int) -> Any:
        """One expert's record from a tag directory, with optimizer state, as a buffer of one row."""
        like = self._experts.buffers[layer]
        record = type(like)(like.layout, (expert,), like.rows.device)
        tensors = load_file(os.path.join(directory, _expert_file(layer, expert)))
        restore_record(record.named_tensors(0), tensors, True, f"layer {layer} expert {expert}")
        return record

    def _check_model(self, manifest: Manifest, directory: str, with_state: bool) -> None:
        saved, here = dict(manifest.model), self._model_description()
        if not with_state:
            saved["expert_optimizer_state"] = here["expert_optimizer_state"]
        differences = list(_differences(saved, here, ""))
        if differences:
            more = f" and {len(differences) - 5} more" if len(differences) > 5 else ""
            raise CheckpointError(
                f"checkpoint {directory} is of another model or optimizer: {'; '.join(differences[:5])}{more}"
            )


def restore_record(target: dict[str, Tensor], source: Mapping[str, Tensor], with_state: bool, what: str) -> None:
    """Fill a record's tensors from a file's, across float32, float64 and bf16 models.

    Weights come from the master copy where there is one; a master comes from the weights where there is none.
    ``with_state`` false: optimizer state and step count start at zero.
    """
    for name, tensor in target.items():
        field, _, rest = name.partition("/")
        if field in ("parameter", "master"):
            best = source.get(f"master/{rest}", source.get(f"parameter/{rest}"))
        elif not with_state:
            tensor.zero_()
            continue
        else:
            best = source.get(name)
        if best is None:
            raise CheckpointError(f"{what}: the checkpoint has no {name!r} (it was trained with another optimizer?)")
        tensor.copy_(best)


def _expert_file(layer: int, expert: int) -> str:
    return os.path.join("experts", f"layer_{layer}_expert_{expert}.safetensors")


def _differences(saved: Any, here: Any, path: str) -> Any:
    if isinstance(saved, dict) and isinstance(here, dict):
        for key in sorted({*saved, *here}):
            name = f"{path}.{key}" if path else str(key)
            if key not in saved:
                yield f"{name} is missing in the checkpoint"
            elif key not in here:
                yield f"{name} is in the checkpoint only"
            else:
                yield from _differences(saved[key], here[key], name)
    elif path == "moe_layers" and len(saved) != len(here):
        yield f"{len(saved)} MoE layers in the checkpoint, {len(here)} in the model"
    elif path == "moe_layers":
        for index, (left, right) in enumerate(zip(saved, here, strict=True)):
            yield from _differences(left, right, f"moe_layers[{index}]")
    elif saved != here:
        yield f"{path} is {saved} in the checkpoint, {here} in the model"
