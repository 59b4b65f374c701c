"""The files of ``deepspeed.moe``'s checkpoints (0.19.8, ZeRO stage 0, no model parallelism) and what they hold.

``mp_rank_00_model_states.pt`` has the dense part, ``layer_<l>_expert_<e>_mp_rank_00_model_states.pt`` the weights of
one expert, ``expp_rank_<r>_mp_rank_00_optim_states.pt`` the whole optimizer of one rank of the expert-parallel group:
that of the dense part and of its experts, which are numbers ``r * n .. r * n + n - 1`` of every layer.
"""

from __future__ import annotations

import argparse
import os
import pickle
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_lazarus.checkpoint.files import CheckpointError
from megatron_lazarus.checkpoint.optimizer_state import Parameter

DENSE_FILE = "mp_rank_00_model_states.pt"
_GATE = "deepspeed_moe.gate.wg.weight"
_EXPERTS = "deepspeed_moe.experts.deepspeed_experts."


def expert_file(layer: int, expert: int) -> str:
    return f"layer_{layer}_expert_{expert}_mp_rank_00_model_states.pt"


def optimizer_file(ep_rank: int) -> str:
    return f"expp_rank_{ep_rank}_mp_rank_00_optim_states.pt"


def ep_size_of(directory: str) -> int:
    """How many optimizer files there are: the size of the expert-parallel group that wrote them; 0 if none."""
    ranks = [re.fullmatch(r"expp_rank_(\d+)_mp_rank_00_optim_states\.pt", name) for name in os.listdir(directory)]
    return max((int(match.group(1)) + 1 for match in ranks if match), default=0)


def load(path: str) -> dict[str, Any]:
    """A file of tensors and plain values. Raises CheckpointError, naming it, if it is damaged or needs a pickle."""
    safe: list[Any] = [argparse.Namespace]
    try:
        with torch.serialization.safe_globals(safe):
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except (pickle.UnpicklingError, RuntimeError, OSError, EOFError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read safely: {str(error).splitlines()[0]}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}; it must be a dict")
    return content


def dense_parameters(state: Mapping[str, Any], tied: bool) -> dict[str, Tensor]:
    """Parameters of the dense part by name, in the model's order, from the content of its file.

    ``tied``: matrices that equal an earlier one are further names of the same parameter, which the file does not say.
    """
    buffers = set(state.get("buffer_names") or ())
    kept: dict[str, Tensor] = {}
    for name, value in state["module"].items():
        if not isinstance(value, Tensor) or name in buffers:
            continue
        if tied and value.dim() > 1 and any(value.shape == o.shape and torch.equal(value, o) for o in kept.values()):
            continue
        kept[name] = value
    return kept


def expert_prefixes(dense: Sequence[str]) -> list[str]:
    """For each MoE layer what its experts' names begin with, up to the expert's number; from the names of gates."""
    return [name.removesuffix(_GATE) + _EXPERTS for name in dense if name.endswith(_GATE)]


def in_model_order(
    dense: Mapping[str, Tensor], layers: Sequence[Mapping[str, Sequence[int]]], local: Sequence[int]
) -> list[Parameter]:
    """Parameters of one rank as ``model.parameters()`` gives them: a layer's experts come behind its gate.

    ``layers`` has the shapes of each layer's experts, ``local`` how many of them a rank has.
    """
    ordered: list[Parameter] = []
    layer = 0
    for name, tensor in dense.items():
        ordered.append(Parameter(name, tuple(tensor.shape)))
        if not name.endswith(_GATE):
            continue
        prefix = name.removesuffix(_GATE) + _EXPERTS
        for expert in range(local[layer]):
            ordered += [
                Parameter(f"{prefix}{expert}.{tensor_name}", tuple(shape), (layer, expert, tensor_name))
                for tensor_name, shape in layers[layer].items()
            ]
        layer += 1
    return ordered


def regrouped_schedule(schedule: Any, bases: Sequence[int]) -> Any:
    """A torch scheduler's state for other parameter groups: group i takes what group ``bases[i]`` had."""
    if isinstance(schedule, dict):
        per_group = ("base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "max_lrs", "base_momentums", "max_momentums")
        return {
            key: [value[base] for base in bases]
            if key in per_group and isinstance(value, (list, tuple)) and len(value) > max(bases)
            else regrouped_schedule(value, bases)
            for key, value in schedule.items()
        }
    if isinstance(schedule, list):
        return [regrouped_schedule(value, bases) for value in schedule]
    return schedule
