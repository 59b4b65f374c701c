"""Reading a checkpoint that ``deepspeed.moe`` wrote as what lazarus writes: dense state and one record per expert."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
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
    arrange,
    step_count,
)
from megatron_lazarus.checkpoint.stock_layout import (
    DENSE_FILE,
    dense_parameters,
    ep_size_of,
    expert_file,
    expert_prefixes,
    in_model_order,
    load,
    optimizer_file,
    regrouped_schedule,
)
from megatron_lazarus.checkpoint.writer import MASTER


class StockCheckpoint:
    """A tag directory of ``deepspeed.moe``, opened.

    ``rules`` say how the optimizer's groups were made. Without files of an optimizer of ZeRO stage 0 (``ep_size`` 0),
    only weights can be taken over. Raises CheckpointError for what is missing, damaged or of another kind.
    """

    def __init__(self, directory: str, rules: Sequence[Rule] = USUAL_RULES) -> None:
        self.directory = directory
        self.dense = load(os.path.join(directory, DENSE_FILE))
        self.num_experts: list[int] = self.dense.get("num_experts", ())
        if not isinstance(self.num_experts, list) or not isinstance(self.dense.get("module"), dict):
            raise CheckpointError(f"{directory} is not a checkpoint of deepspeed.moe: it does not count experts")
        if self.dense.get("ds_autoep_layers"):
            raise CheckpointError(f"{directory} is of DeepSpeed's AutoEP, whose experts are laid out otherwise")
        self.ep_size = ep_size_of(directory)
        self.prefixes = expert_prefixes(list(dense_parameters(self.dense, False)))
        if len(self.prefixes) != len(self.num_experts):
            raise CheckpointError(
                f"{directory} counts experts for {len(self.num_experts)} MoE layers, but has {len(self.prefixes)} gates"
            )
        self.shapes = [
            {name: list(tensor.shape) for name, tensor in self._weights(layer, 0).items()}
            for layer in range(len(self.num_experts))
        ]
        if any(count % max(1, self.ep_size) for count in self.num_experts):
            raise CheckpointError(
                f"{directory} has {self.num_experts} experts and files of {self.ep_size} expert-parallel ranks, which "
                "do not divide them; layers of different ep_size cannot be converted"
            )
        self._optimizer, self.parameters = self._read_first_optimizer(rules)

    def _read_first_optimizer(self, rules: Sequence[Rule]) -> tuple[NamedOptimizer | None, list[Parameter]]:
        if not self.ep_size:
            return None, self._in_order(tied=True)
        try:
            parameters = self._in_order(tied=False)
            return self._read_optimizer(0, parameters, rules), parameters
        except CheckpointError:
            parameters = self._in_order(tied=True)
            return self._read_optimizer(0, parameters, rules), parameters

    def _in_order(self, tied: bool) -> list[Parameter]:
        local = [count // max(1, self.ep_size) for count in self.num_experts]
        return in_model_order(dense_parameters(self.dense, tied), self.shapes, local)

    def _read_optimizer(self, ep_rank: int, parameters: Sequence[Parameter], rules: Sequence[Rule]) -> NamedOptimizer:
        path = os.path.join(self.directory, optimizer_file(ep_rank))
        return NamedOptimizer.read(load(path)["optimizer"], parameters, rules, path)

    def _weights(self, layer: int, expert: int) -> dict[str, Tensor]:
        path = os.path.join(self.directory, expert_file(layer, expert))
        prefix = f"{self.prefixes[layer]}{expert}."
        content = load(path)
        if foreign := [name for name in content if not name.startswith(prefix)]:
            raise CheckpointError(f"{path} holds {foreign[0]!r}; every name in it must begin with {prefix!r}")
        return {name.removeprefix(prefix): tensor for name, tensor in content.items()}

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
                {"num_experts": count, "tensors": shapes}
                for count, shapes in zip(self.num_experts, self.shapes, strict=True)
            ],
            "expert_optimizer_state": self.state_names,
        }

    def dense_state(self) -> dict[str, Any]:
        """The content of lazarus' dense file: the same, with an optimizer of the dense parameters alone."""
        state = {key: value for key, value in self.dense.items() if key not in ("num_experts", "ds_autoep_layers")}
        if self._optimizer is None:
            return {**state, "optimizer": None}
        optimizer = self._optimizer
        bases = [option for option in optimizer.options if not option.get("moe")]
        dense = [parameter for parameter in self.parameters if parameter.home is None]
        groups = arrange(dense, optimizer.rule, len(bases), split=False)
        assert groups is not None, "the rule fitted these parameters and their experts before"
        ours = replace(optimizer, groups=groups, options=bases)
        schedule = regrouped_schedule(state.get("lr_scheduler"), [group.base for group in groups])
        return {**state, "optimizer": ours.state_dict(), "lr_scheduler": schedule}

    def records(self) -> Iterator[tuple[int, int, dict[str, Tensor]]]:
        """(layer, expert, record) of every expert, the record as ``<field>/<tensor>`` and ``step``."""
        for ep_rank in range(max(1, self.ep_size)):
            optimizer = None
            if self._optimizer is not None:
                optimizer = self._read_optimizer(ep_rank, self.parameters, [self._optimizer.rule])
            for layer, count in enumerate(self.num_experts):
                local = count // max(1, self.ep_size)
                for index in range(local):
                    expert = ep_rank * local + index
                    record = {f"parameter/{name}": tensor for name, tensor in self._weights(layer, expert).items()}
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
