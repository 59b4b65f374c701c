"""``megatron_lazarus.initialize``: from a model and a DeepSpeed config to a LazarusEngine.

Everything that can be wrong with the configuration is found before a process group is made.
"""

from __future__ import annotations

import copy
import logging
import os
import socket
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from megatron_lazarus.config import (
    BatchSizes,
    ConfigError,
    LazarusConfig,
    batch_sizes,
    load_config,
    refuse_unsupported,
    slots_per_rank,
)
from megatron_lazarus.engine import LazarusEngine
from megatron_lazarus.expert_state import ExpertState
from megatron_lazarus.joining import (
    elastic_from_environment,
    joins_coordinator,
    private_world,
    without_shared_memory_extension,
)
from megatron_lazarus.moe.balanced_split import balanced_quotas
from megatron_lazarus.moe.context import StepContext
from megatron_lazarus.moe.dispatch import replica_quotas
from megatron_lazarus.moe.layer import MoELayer
from megatron_lazarus.moe.optimizer import optimizer_kind, record_state_names
from megatron_lazarus.moe.records import RecordBuffer, RecordLayout
from megatron_lazarus.optimizer_groups import groups_of
from megatron_lazarus.patches import ALWAYS, apply_all, unpatched
from megatron_lazarus.placing import plan_for
from megatron_lazarus.planning.plan import Placement, Plan
from megatron_lazarus.training_data import training_loader

logger = logging.getLogger(__name__)

OptionGroups = list[dict[str, int | None]]
"""For each layer: expert tensor name -> index of its group in the client optimizer."""


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Any = None,
    config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    mesh_param: Any = None,
    config_params: str | Mapping[str, Any] | None = None,
    *,
    seed: int | None = None,
    plan: Plan | None = None,
) -> tuple[LazarusEngine, Any, Any, Any]:
    """Take ``deepspeed.initialize``'s arguments and return its four values, the engine being a LazarusEngine.

    ``seed`` keys the random numbers of every (step, micro-batch), by default 1234, and the order of ``training_data``,
    by default 0 as in DeepSpeed. The loader that is returned for it is a TrainingData. ``plan`` fixes the placement of
    experts for good; by default it is planned from uniform loads, and changed when loads change. Raises ConfigError or
    ValueError, before any process group is made, for what cannot work.
    """
    if model is None:
        raise ConfigError("megatron_lazarus.initialize requires a model")
    args, ds_config = read_config(args, config, config_params)
    data_seed, seed = (0, 1234) if seed is None else (seed, seed)
    section = LazarusConfig.from_json(ds_config.pop("lazarus", {}))
    if not section.enabled:
        raise ConfigError('"lazarus.enabled" is false; call deepspeed.initialize instead')
    refuse_unsupported(ds_config)
    _refuse_model_parallelism(model, mpu)
    if isinstance(optimizer, torch.optim.Optimizer):
        optimizer_kind(optimizer)
        record_state_names(optimizer)
    joins = joins_coordinator(section)
    world_size, rank = (1, 0) if joins else _expected_world()
    sizes = batch_sizes(ds_config, world_size)
    if joins and "train_batch_size" not in ds_config:
        raise ConfigError('"train_batch_size" is missing; a run whose ranks come and go needs a fixed global batch')
    data = None if training_data is None else training_loader(training_data, sizes, ds_config, data_seed, collate_fn)
    if plan is not None:
        section = replace(section, experts=replace(section.experts, rebalance_interval=None))
    layers = [module for module in model.modules() if isinstance(module, MoELayer)]
    _refuse_stock_layers(model)
    for layer in layers:
        if not joins:
            slots_per_rank(section.experts, layer.num_experts, world_size)
        if section.experts.max_tokens_per_expert_chunk is not None:
            layer.experts.max_tokens_per_chunk = section.experts.max_tokens_per_expert_chunk

    import deepspeed
    from deepspeed.runtime.constants import GRADIENT_CLIPPING_DEFAULT

    apply_all(ALWAYS)
    without_shared_memory_extension()
    elastic = elastic_from_environment(ds_config) if joins else None
    if elastic is not None:
        # DeepSpeed's constructor runs collectives in which no other member would take part.
        private_world()
    elif not dist.is_initialized():
        from deepspeed.accelerator import get_accelerator

        deepspeed.init_distributed(get_accelerator().communication_backend_name(), distributed_port=distributed_port)
    if model_parameters is not None:
        model_parameters = list(model_parameters)
    parameter_groups = groups_of(
        model, layers, optimizer, model_parameters, bool((ds_config.get("bf16") or {}).get("enabled"))
    )
    optimizer, model_parameters, option_groups = _take_experts_out(layers, optimizer, model_parameters)
    ds_engine, ds_optimizer, _, scheduler = unpatched("deepspeed:initialize")(
        args=args,
        model=model,
        optimizer=optimizer,
        model_parameters=model_parameters,
        lr_scheduler=lr_scheduler,
        distributed_port=distributed_port,
        mpu=mpu,
        dist_init_required=dist_init_required,
        collate_fn=collate_fn,
        config=_deepspeed_config(ds_config, sizes, world_size),
        mesh_param=mesh_param,
    )
    state_names = record_state_names(ds_engine.basic_optimizer)
    layouts = []
    for layer, groups in zip(layers, option_groups, strict=True):
        _convert(layer.experts, ds_engine)
        layouts.append(layer.experts.layout(groups, state_names))
    if elastic is None:
        uniform = [np.ones(layer.num_experts) for layer in layers]
        plan = plan or plan_for(uniform, section.experts, _rank_nodes(world_size))
        _check_plan(plan, layers, world_size)
        buffers = [
            _into_records(layer, layout, placement, rank, ds_engine.device)
            for layer, layout, placement in zip(layers, layouts, plan.layers, strict=True)
        ]
    else:
        plan = None
        buffers = [RecordBuffer(layout, (), ds_engine.device) for layout in layouts]
    engine = LazarusEngine(
        ds_engine,
        experts=ExpertState(
            layers,
            buffers,
            plan,
            StepContext(),
            rank,
            ds_engine.basic_optimizer,
            parameter_groups,
            quotas=balanced_quotas if section.experts.split == "balanced" else replica_quotas,
            # Loads of the interval before the last one weigh next to nothing.
            load_steps=(section.experts.rebalance_interval or 150) // 3,
        ),
        sizes=sizes,
        config=section,
        gradient_clipping=float(ds_config.get("gradient_clipping", GRADIENT_CLIPPING_DEFAULT)),
        seed=seed,
        elastic=elastic,
        data=data,
    )
    return engine, ds_optimizer, data, scheduler


def read_config(args: Any, config: Any, config_params: Any = None) -> tuple[Any, dict[str, Any]]:
    """The DeepSpeed config as a dict, and the arguments without the path it may have come from.

    Raises ConfigError if there is none, or more than one.
    """
    config = config if config is not None else config_params
    from_args = getattr(args, "deepspeed_config", None)
    if config is not None and from_args is not None:
        raise ConfigError(f"config is given twice: as an argument, and as --deepspeed_config {from_args}")
    if from_args is not None:
        args = copy.copy(args)
        args.deepspeed_config = None
        config = from_args
    if config is None:
        raise ConfigError("megatron_lazarus.initialize needs config=... or args.deepspeed_config")
    return args, load_config(config)


def _deepspeed_config(config: dict[str, Any], sizes: BatchSizes, world_size: int) -> dict[str, Any]:
    """What DeepSpeed's engine gets: its batch arithmetic holds for this world, clipping is done outside of it."""
    inner = {key: value for key, value in config.items() if key != "train_batch_size"}
    inner["train_micro_batch_size_per_gpu"] = sizes.micro_batch_size
    inner["gradient_accumulation_steps"] = -(-sizes.micro_batches // world_size)
    inner["gradient_clipping"] = 0.0
    return inner


def _refuse_model_parallelism(model: nn.Module, mpu: Any) -> None:
    if type(model).__name__ == "PipelineModule":
        raise ConfigError("model is a PipelineModule; pipeline parallelism is not supported")
    for name in ("tensor_model_parallel", "model_parallel", "pipeline_model_parallel", "pipe_parallel"):
        size = getattr(mpu, f"get_{name}_world_size", None)
        if size is not None and size() > 1:
            raise ConfigError(f"mpu reports a {name} size of {size()}; only 1 is supported")


def _refuse_stock_layers(model: nn.Module) -> None:
    stock = unpatched("deepspeed.moe.layer:MoE")
    for name, module in model.named_modules():
        if isinstance(module, stock):
            raise ConfigError(
                f"{name!r} is a layer of DeepSpeed's own class deepspeed.moe.layer.MoE; start the script through "
                "megatron_lazarus.launch or lazarus run, which replace it, or construct megatron_lazarus.MoELayer"
            )


def _expected_world() -> tuple[int, int]:
    if dist.is_initialized():
        return dist.get_world_size(), dist.get_rank()
    return int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))


def _take_experts_out(layers: list[MoELayer], optimizer: Any, model_parameters: Any) -> tuple[Any, Any, OptionGroups]:
    """Detach the experts from their layers and from the optimizer's groups, remembering whose options they had.

    A group that held nothing but experts keeps an empty parameter, so that it, its learning rate and the schedulers
    that act on it stay.
    """
    home = {
        id(parameter): (index, name)
        for index, layer in enumerate(layers)
        for _, name, parameter in layer.experts.local_parameters()
    }
    frozen = {id(p) for layer in layers for _, _, p in layer.experts.local_parameters() if not p.requires_grad}
    options: OptionGroups = [{} for _ in layers]
    groups = optimizer.param_groups if isinstance(optimizer, torch.optim.Optimizer) else []

    def alike(one: int | None, other: int) -> bool:
        # DeepSpeed splits groups of experts that are large.
        return one == other or (
            one is not None
            and max(one, other) < len(groups)
            and {k: v for k, v in groups[one].items() if k != "params"}
            == {k: v for k, v in groups[other].items() if k != "params"}
        )

    def without_experts(parameters: Iterable[nn.Parameter], group: int) -> list[nn.Parameter]:
        kept = []
        for parameter in parameters:
            if id(parameter) not in home:
                kept.append(parameter)
            elif id(parameter) not in frozen:
                layer, name = home[id(parameter)]
                if not alike(options[layer].setdefault(name, group), group):
                    raise ConfigError(
                        f"experts of MoE layer {layer} have their {name!r} in optimizer groups "
                        f"{options[layer][name]} and {group}; all experts of a layer need the same options"
                    )
        return kept or [nn.Parameter(torch.empty(0))]

    if isinstance(optimizer, torch.optim.Optimizer):
        for index, group in enumerate(optimizer.param_groups):
            group["params"] = without_experts(group["params"], index)
        for parameter in [p for p in optimizer.state if id(p) in home]:
            del optimizer.state[parameter]
    elif model_parameters is not None:
        entries = list(model_parameters)
        if entries and isinstance(entries[0], dict):
            model_parameters = [
                {**entry, "params": without_experts(list(entry["params"]), index)}
                for index, entry in enumerate(entries)
            ]
        else:
            model_parameters = without_experts(entries, 0)
    else:
        for index, layer in enumerate(layers):
            for _, name, parameter in layer.experts.local_parameters():
                if parameter.requires_grad:
                    options[index][name] = 0
    for layer in layers:
        layer.experts.detach()
    return optimizer, model_parameters, options


def _convert(experts: nn.Module, ds_engine: Any) -> None:
    """What DeepSpeed did to the modules that it found registered, these not among them."""
    experts.to(device=ds_engine.device)
    if not ds_engine.bfloat16_enabled():
        return
    if not hasattr(ds_engine, "_mixed_precision_dtypes"):
        experts.to(dtype=torch.bfloat16)
        return
    # It then leaves buffers as they are, unless the JSON says otherwise.
    parameters, buffers = ds_engine._mixed_precision_dtypes()

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        dtype = parameters if isinstance(tensor, nn.Parameter) else buffers
        return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor

    experts._apply(convert)


def _rank_nodes(world_size: int) -> tuple[int, ...]:
    """Node number of each rank, in order of first appearance; a node is a host, or what LAZARUS_NODE names."""
    label = os.environ.get("LAZARUS_NODE") or socket.gethostname()
    labels: list[Any] = [label]
    if world_size > 1:
        labels = [None] * world_size
        dist.all_gather_object(labels, label)
    order = list(dict.fromkeys(labels))
    return tuple(order.index(entry) for entry in labels)


def _check_plan(plan: Plan, layers: list[MoELayer], world_size: int) -> None:
    if len(plan.layers) != len(layers) or plan.world_size != world_size:
        raise ConfigError(
            f"plan is for {len(plan.layers)} MoE layers on {plan.world_size} ranks; the model has {len(layers)} on "
            f"{world_size}"
        )
    for index, (placement, layer) in enumerate(zip(plan.layers, layers, strict=True)):
        if placement.num_experts != layer.num_experts:
            raise ConfigError(
                f"plan.layers[{index}] is for {placement.num_experts} experts; the layer has {layer.num_experts}"
            )


def _into_records(layer: MoELayer, layout: RecordLayout, placement: Placement, rank: int, device: Any) -> RecordBuffer:
    """Move the layer's experts into records; each expert's initial values are those of one rank."""
    buffer = RecordBuffer(layout, placement.slots[rank], torch.device(device))
    for expert in range(layer.num_experts):
        record = layer.experts.initial_record(layout, expert, buffer.rows.device)
        if placement.world_size > 1:
            # Ranks that seeded alike hold the same values anyway; else this is where DeepSpeed would have built it.
            dist.broadcast(record.rows, src=layer.initial_rank(expert, placement.world_size))
        for slot, held in enumerate(buffer.experts):
            if held == expert:
                buffer.rows[slot] = record.rows[0]
    layer.experts.bind(buffer)
    layer.experts.forget_initial()
    return buffer
