"""Which parameters a script gives to which group of its optimizer, by name: what checkpoints need to know of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import deepspeed
import deepspeed.runtime.utils
import torch
from torch import nn

from megatron_lazarus.checkpoint.optimizer_state import Group, Parameter, split_for_moe
from megatron_lazarus.checkpoint.parameter_groups import ParameterGroups
from megatron_lazarus.moe.layer import MoELayer


def groups_of(
    model: nn.Module, layers: Sequence[MoELayer], optimizer: Any, model_parameters: Any, bf16: bool
) -> ParameterGroups:
    """The groups as ``deepspeed.moe`` would have them, before experts are taken out of their layers.

    ``optimizer`` and ``model_parameters`` are ``deepspeed.initialize``'s, the latter a list or None. For an optimizer
    of the JSON (None) DeepSpeed puts experts into groups of their own; others have them where the script put them.
    """
    # Since it has this function, DeepSpeed's optimizer for bf16 leaves out what is frozen or has no elements.
    leaves_out = bf16 and hasattr(deepspeed.runtime.utils, "is_optimized_parameter")
    known = {id(parameter): Parameter(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()}
    for index, layer in enumerate(layers):
        for local, tensor, parameter in layer.experts.local_parameters():
            known[id(parameter)] = replace(known[id(parameter)], home=(index, local, tensor))
    if isinstance(optimizer, torch.optim.Optimizer):
        entries: list[Any] = optimizer.param_groups
    else:
        entries = list(model.parameters()) if model_parameters is None else list(model_parameters)
        if not entries or not isinstance(entries[0], dict):
            entries = [{"params": entries}]
    groups = [
        Group(
            tuple(
                known.get(id(parameter), Parameter(f"(not of the model) {base}.{position}", tuple(parameter.shape)))
                for position, parameter in enumerate(entry["params"])
                if not leaves_out or deepspeed.runtime.utils.is_optimized_parameter(parameter)
            ),
            base,
            bool(entry.get("moe")),
        )
        for base, entry in enumerate(entries)
    ]
    if optimizer is None and not any("moe" in entry for entry in entries):
        groups = split_for_moe(groups)
    # DeepSpeed drops groups that hold nothing.
    held = tuple(group for group in groups if group.parameters)
    constructed = tuple(layer.experts.constructed for layer in layers)
    return ParameterGroups(held, len(entries), constructed, placeholders=not leaves_out)
