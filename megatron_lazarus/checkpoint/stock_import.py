"""Reading a checkpoint that ``deepspeed.moe`` wrote as what lazarus writes: dense state and one record per expert."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_lazarus.checkpoint.files import CheckpointError
from megatron_lazarus.checkpoint.optimizer_state import (
    STEP,
    USUAL_RULES,
    NamedOptimizer,
    Parameter,
    Rule,
    step_count,
)
from megatron_lazarus.checkpoint.parameter_groups import KEY, ParameterGroups, key, regrouped
from megatron_lazarus.checkpoint.stock_layout import (
    DENSE_FILE,
    dense_parameters,
    ep_size_of,
    expert_file,
    expert_prefixes,
    in_model_order,
    load,
    optimizer_file,
)
from megatron_lazarus.checkpoint.writer import BUFFER, MASTER, PARAMETER


class StockCheckpoint:
    """A tag directory of ``deepspeed.moe``, opened.

    ``groups``, if they are known, or ``rules`` say how the optimizer's groups were made. Without files of an optimizer
    of ZeRO stage 0, or ``with_state`` false, only weights are taken over (``ep_size`` 0). ``buffers``: names of what is
    no parameter in the experts of each layer; without them what the file says (DeepSpeed 0.18.9 does not), or types.
    Raises CheckpointError for what is missing, damaged or of another kind.
    """

    def __init__(
        self,
        directory: str,
        rules: Sequence[Rule] = USUAL_RULES,
        groups: ParameterGroups | None = None,
        with_state: bool = True,
        buffers: Sequence[Collection[str]] | None = None,
    ) -> None:
        self.directory = directory
        self.dense = load(os.path.join(directory, DENSE_FILE))
        self.num_experts: list[int] = self.dense.get("num_experts", ())
        if not isinstance(self.num_experts, list) or not isinstance(self.dense.get("module"), dict):
            raise CheckpointError(f"{directory} is not a checkpoint of deepspeed.moe: it does not count experts")
        if self.dense.get("ds_autoep_layers"):
            raise CheckpointError(f"{directory} is of DeepSpeed's AutoEP, whose experts are laid out otherwise")
        self.ep_size = ep_size_of(directory) if with_state else 0
        self.prefixes = expert_prefixes(list(dense_parameters(self.dense, False)))
        if len(self.prefixes) != len(self.num_experts):
            raise CheckpointError(
                f"{directory} counts experts for {len(self.num_experts)} MoE layers, but has {len(self.prefixes)} gates"
            )
        weights = [self._weights(layer, 0) for layer in range(len(self.num_experts))]
        self._buffer_names = [set(names) for names in buffers] if buffers else self._told_buffers(weights)
        self.shapes = [self._shapes(layer, held, False) for layer, held in enumerate(weights)]
        self.buffers = [self._shapes(layer, held, True) for layer, held in enumerate(weights)]
        if any(count % max(1, self.ep_size) for count in self.num_experts):
            raise CheckpointError(
                f"{directory} has {self.num_experts} experts and files of {self.ep_size} expert-parallel ranks, which "
                "do not divide them; layers of different ep_size cannot be converted"
            )
        self._read_groups(rules, groups)

    def _told_buffers(self, weights: Sequence[Mapping[str, Tensor]]) -> list[set[str]]:
        told = self.dense.get("buffer_names") or ()
        return [
            {name for name, value in held.items() if f"{prefix}0.{name}" in told or not value.is_floating_point()}
            for prefix, held in zip(self.prefixes, weights, strict=True)
        ]

    def _shapes(self, layer: int, weights: dict[str, Tensor], buffers: bool) -> dict[str, list[int]]:
        return {
            name: list(tensor.shape)
            for name, tensor in weights.items()
            if (name in self._buffer_names[layer]) == buffers
        }

    def _read_groups(self, rules: Sequence[Rule], groups: ParameterGroups | None) -> None:
        """Find out what the optimizer's groups hold."""
        self._optimizer: NamedOptimizer | None = None
        self.parameters = self._in_order(tied=True)
        local = [count // max(1, self.ep_size) for count in self.num_experts]
        if not self.ep_size:
            return
        path = os.path.join(self.directory, optimizer_file(0))
        state = load(path)["optimizer"]
        if groups is not None:
            self._optimizer = NamedOptimizer.read(state, groups.for_local(local), path)
            return
        try:
            in_order = self._in_order(tied=False)
            self._optimizer, _ = NamedOptimizer.guess(state, in_order, rules, path)
            self.parameters = in_order
        except CheckpointError:
            self._optimizer, _ = NamedOptimizer.guess(state, self.parameters, rules, path)

    def _in_order(self, tied: bool) -> list[Parameter]:
        local = [count // max(1, self.ep_size) for count in self.num_experts]
        return in_model_order(dense_parameters(self.dense, tied), self.shapes, local)

    def _read_optimizer(self, ep_rank: int) -> NamedOptimizer:
        assert self._optimizer is not None
        path = os.path.join(self.directory, optimizer_file(ep_rank))
        return NamedOptimizer.read(load(path)["optimizer"], self._optimizer.groups, path)

    def _weights(self, layer: int, expert: int) -> dict[str, Tensor]:
        path = os.path.join(self.directory, expert_file(layer, expert))
        prefix = f"{self.prefixes[layer]}{expert}."
        content = load(path)
        if foreign := [name for name in content if not name.startswith(prefix)]:
            raise CheckpointError(f"{path} holds {foreign[0]!r}; every name in it must begin with {prefix!r}")
        return {name.removeprefix(prefix): tensor for name, tensor in content.items()}

    def dense_shapes(self) -> dict[str, list[int]]:
        """Of all parameters of the dense part by name, tied ones by all their names."""
        return {name: list(tensor.shape) for name, tensor in dense_parameters(self.dense, tied=False).items()}

    @property
    def global_steps(self) -> int:
        return int(self.dense["global_steps"])

    @property
    def state_names(self) -> list[str]:
        """State tensors that the optimizer keeps for every parameter."""
        if self._optimizer is None:
            return []
        entries = [self._optimizer.entries.get(p.name, {}) for p in self.parameters if p.home is not None]
        tensors = {name for entry in entries for name, value in entry.items() if isinstance(value, Tensor)}
        return sorted(tensors - {STEP, MASTER})

    def model(self) -> dict[str, Any]:
        """The description of the model that a manifest holds."""
        return {
            "dense": {p.name: list(p.shape) for p in self.parameters if p.home is None},
            "moe_layers": [
                {"num_experts": count, "tensors": shapes, **({"buffers": buffers} if buffers else {})}
                for count, shapes, buffers in zip(self.num_experts, self.shapes, self.buffers, strict=True)
            ],
            "expert_optimizer_state": self.state_names,
        }

    def dense_state(self, target: ParameterGroups | None = None) -> dict[str, Any]:
        """The content of lazarus' dense file: the same, with an optimizer of the dense parameters alone.

        Its groups are those of ``target``, by default the ones that are found here.
        """
        state = {key: value for key, value in self.dense.items() if key not in ("num_experts", "ds_autoep_layers")}
        if self._optimizer is None:
            return {**state, "optimizer": None}
        optimizer = self._optimizer
        home = {key(p): index for index, group in enumerate(optimizer.groups) for p in group.parameters}
        groups = target or self._as_found()
        state["optimizer"], state["lr_scheduler"] = regrouped(optimizer, state.get("lr_scheduler"), home, groups)
        return state if target is not None else {**state, KEY: groups.to_json()}

    def _as_found(self) -> ParameterGroups:
        assert self._optimizer is not None
        groups = tuple(replace(group, base=index) for index, group in enumerate(self._optimizer.groups))
        local = tuple(count // self.ep_size for count in self.num_experts)
        return ParameterGroups(groups, len(groups), local, placeholders=self._optimizer.wrapper is None)

    def records(
        self, wanted: Callable[[int, int], bool] = lambda layer, expert: True
    ) -> Iterator[tuple[int, int, dict[str, Tensor]]]:
        """(layer, expert, record) of experts that are ``wanted``; the record as ``<field>/<tensor>`` and ``step``."""
        for ep_rank in range(max(1, self.ep_size)):
            numbers = [
                (layer, index, ep_rank * (count // max(1, self.ep_size)) + index)
                for layer, count in enumerate(self.num_experts)
                for index in range(count // max(1, self.ep_size))
            ]
            numbers = [number for number in numbers if wanted(number[0], number[2])]
            optimizer = self._read_optimizer(ep_rank) if numbers and self._optimizer is not None else None
            for layer, index, expert in numbers:
                weights = self._weights(layer, expert)
                record = {
                    f"{BUFFER if name in self.buffers[layer] else PARAMETER}/{name}": tensor
                    for name, tensor in weights.items()
                }
                if optimizer is not None:
                    record |= self._state(optimizer, layer, index, expert)
                yield layer, expert, record

    def _state(self, optimizer: NamedOptimizer, layer: int, local: int, expert: int) -> dict[str, Tensor]:
        """Everything of a record but the weights; frozen tensors, which the optimizer does not know, get zeros."""
        entries = {
            name: optimizer.entries.get(f"{self.prefixes[layer]}{local}.{name}", {}) for name in self.shapes[layer]
        }
        uncounted = self.global_steps - int(self.dense.get("skipped_steps", 0))
        steps = {step_count(entry, uncounted) for entry in entries.values() if entry}
        if len(steps) > 1:
            raise CheckpointError(
                f"layer {layer} expert {expert}: its tensors have been stepped {sorted(steps)} times; they must agree"
            )
        record = {STEP: torch.tensor([float(steps.pop() if steps else uncounted)])}
        weights = self._weights(layer, expert)
        for name, entry in entries.items():
            if optimizer.wrapper is not None:
                record[f"{MASTER}/{name}"] = entry.get(MASTER, weights[name].float())
            like = record.get(f"{MASTER}/{name}", weights[name])
            for field in self.state_names:
                value = entry.get(field)
                record[f"{field}/{name}"] = torch.zeros_like(like) if value is None else value
        return record
