"""Writing a lazarus checkpoint as one that ``deepspeed.moe`` loads, for any size of its expert-parallel groups."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_lazarus.checkpoint.files import CheckpointError, fsync_path
from megatron_lazarus.checkpoint.optimizer_state import (
    PLACEHOLDER,
    STEP,
    USUAL_RULES,
    Group,
    NamedOptimizer,
    Parameter,
    Rule,
    arrange,
    split_for_moe,
)
from megatron_lazarus.checkpoint.parameter_groups import KEY, ParameterGroups, key
from megatron_lazarus.checkpoint.stock_layout import (
    DENSE_FILE,
    expert_file,
    expert_prefixes,
    in_model_order,
    optimizer_file,
    regrouped_schedule,
)
from megatron_lazarus.checkpoint.writer import BUFFER, MASTER, PARAMETER

ReadRecord = Callable[[int, int], Mapping[str, Tensor]]
"""(layer, expert) -> its record as ``<field>/<tensor>`` and ``step``."""


class StockExport:
    """Converts ``dense``, the content of lazarus' dense file, and the records of a checkpoint of ``model``.

    ``model`` is the manifest's description. ``ep_size``: of the run that will load it; ``split``: whether its optimizer
    has groups of their own for experts, as DeepSpeed makes them for an optimizer from the JSON and asks of client
    optimizers; None: as the script that wrote the checkpoint would under DeepSpeed. ``rules`` serve checkpoints that do
    not say which parameters their groups hold. Raises CheckpointError for what ``deepspeed.moe`` cannot represent.
    """

    def __init__(
        self,
        dense: Mapping[str, Any],
        model: Mapping[str, Any],
        ep_size: int,
        split: bool | None = None,
        world_size: int | None = None,
        rules: Sequence[Rule] = USUAL_RULES,
    ) -> None:
        self._dense = {name: value for name, value in dense.items() if name != KEY}
        self._ep_size = ep_size
        self._world_size = world_size or ep_size
        self._layers = model["moe_layers"]
        self._num_experts = [layer["num_experts"] for layer in self._layers]
        if ep_size < 1 or any(count % ep_size for count in self._num_experts):
            raise CheckpointError(
                f"ep_size is {ep_size}; it must divide the experts of every layer: {self._num_experts}"
            )
        if self._world_size % ep_size:
            raise CheckpointError(f"the world size is {self._world_size}; it must be a multiple of ep_size {ep_size}")
        if biases := [name for name in dense["module"] if name.endswith("gate.expert_bias")]:
            raise CheckpointError(f"{biases[0]}: deepspeed.moe has no router with an expert bias")
        shapes = [layer["tensors"] for layer in self._layers]
        # The module's state also has the further names of tied parameters.
        parameters = {name: dense["module"][name] for name in dense["module"] if name in model["dense"]}
        self._prefixes = expert_prefixes(list(parameters))
        self._local = [count // ep_size for count in self._num_experts]
        self._parameters = in_model_order(parameters, shapes, self._local)
        self._optimizer: NamedOptimizer | None = None
        self._groups: list[Group] = []
        if dense.get("optimizer") is not None:
            self._read_optimizer(dense, split, rules)

    def _read_optimizer(self, dense: Mapping[str, Any], split: bool | None, rules: Sequence[Rule]) -> None:
        what = "the optimizer of the dense part"
        if KEY not in dense:
            own = [parameter for parameter in self._parameters if parameter.home is None]
            self._optimizer, rule = NamedOptimizer.guess(dense["optimizer"], own, rules, what)
            groups = arrange(self._parameters, rule, len(self._optimizer.options), split is not False)
            assert groups is not None, "the rule fitted the dense parameters, whose groups these are"
            self._groups = groups
            return
        saved = ParameterGroups.from_json(dense[KEY])
        self._optimizer = NamedOptimizer.read(dense["optimizer"], saved.dense(), what)
        groups = saved.for_local(self._local)
        if split is not None and split != any(group.moe for group in groups):
            home = {key(p): group.base for group in groups for p in group.parameters}
            together = [
                Group(tuple(p for p in self._parameters if home.get(key(p)) == base), base, False)
                for base in range(saved.here)
            ]
            groups = split_for_moe(together) if split else together
        self._groups = groups

    def write(self, directory: str, record_of: ReadRecord, progress: Callable[[int], None]) -> None:
        """Write all files into ``directory``; ``progress`` is told how many experts are done."""
        done = 0
        for ep_rank in range(self._ep_size):
            entries: dict[str, dict[str, Any]] = {}
            for layer, count in enumerate(self._num_experts):
                local = count // self._ep_size
                for index in range(local):
                    expert = ep_rank * local + index
                    record = record_of(layer, expert)
                    weights = {
                        f"{self._prefixes[layer]}{expert}.{name}": record[f"{PARAMETER}/{name}"].contiguous()
                        for name in self._layers[layer]["tensors"]
                    } | {
                        f"{self._prefixes[layer]}{expert}.{name}": record[f"{BUFFER}/{name}"].contiguous()
                        for name in self._layers[layer].get("buffers", ())
                    }
                    _save(weights, os.path.join(directory, expert_file(layer, expert)))
                    entries |= self._entries(layer, index, record)
                    done += 1
                    progress(done)
            optimizer, schedule = self._whole_optimizer(entries)
            _save({"optimizer": optimizer}, os.path.join(directory, optimizer_file(ep_rank)))
            if ep_rank == 0:
                dense = {
                    **self._dense,
                    "optimizer": optimizer,
                    "lr_scheduler": schedule,
                    "dp_world_size": self._world_size,
                    "num_experts": self._num_experts,
                    "ds_autoep_layers": None,
                    "buffer_names": self._buffer_names(),
                }
                _save(dense, os.path.join(directory, DENSE_FILE))
        fsync_path(directory)

    def _buffer_names(self) -> list[str]:
        """Of the dense part and of one rank's experts."""
        names = [name for name in self._dense.get("buffer_names") or () if not name.startswith(tuple(self._prefixes))]
        for layer, prefix in enumerate(self._prefixes):
            buffers = self._layers[layer].get("buffers", ())
            names += [f"{prefix}{index}.{name}" for index in range(self._local[layer]) for name in buffers]
        return names

    def _entries(self, layer: int, local: int, record: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
        """The optimizer's entries for one expert, by the names that one rank has for its parameters."""
        if self._optimizer is None:
            return {}
        step = float(record[STEP].reshape(-1)[0])
        counted = [entry[STEP] for entry in self._optimizer.entries.values() if STEP in entry]
        entries: dict[str, dict[str, Any]] = {}
        for name in self._layers[layer]["tensors"]:
            entry: dict[str, Any] = {
                key.partition("/")[0]: value
                for key, value in record.items()
                if key.partition("/")[2] == name and key.partition("/")[0] != PARAMETER
            }
            if counted:
                entry[STEP] = torch.full_like(counted[0], step) if isinstance(counted[0], Tensor) else int(step)
            if self._optimizer.wrapper is None:
                entry.pop(MASTER, None)
            entries[f"{self._prefixes[layer]}{local}.{name}"] = entry
        return entries

    def _whole_optimizer(self, experts: Mapping[str, dict[str, Any]]) -> tuple[Any, Any]:
        """The optimizer state of one rank of the expert-parallel group, and the scheduler's for its groups."""
        schedule = self._dense.get("lr_scheduler")
        if self._optimizer is None:
            return None, schedule
        source = self._optimizer
        groups = [replace(g, parameters=tuple(p for p in g.parameters if p != PLACEHOLDER)) for g in self._groups]
        options = []
        for group in groups:
            option = {"name": f"group{group.base}", **source.options[group.base]}
            if group.moe:
                option |= {"name": f"ep_size_{self._ep_size}", "moe": True}
            if STEP in option:
                option[STEP] = _common_step(group.parameters, {**source.entries, **experts})
            options.append(option)
        whole = replace(source, groups=groups, options=options, entries={**source.entries, **experts})
        return whole.state_dict(), regrouped_schedule(schedule, [group.base for group in groups])


def _common_step(parameters: Sequence[Parameter], entries: Mapping[str, dict[str, Any]]) -> int:
    steps = {int(entries[parameter.name][STEP]) for parameter in parameters if STEP in entries[parameter.name]}
    if len(steps) != 1:
        raise CheckpointError(
            f"this optimizer counts steps by group, but parameters of one group were stepped {sorted(steps)} times"
        )
    return steps.pop()


def _save(content: Mapping[str, Any], path: str) -> None:
    torch.save(dict(content), path)
    fsync_path(path)
