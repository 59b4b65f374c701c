"""From parsed arguments to what the parts want: model, data and DeepSpeed configuration, optimizer, learning rate."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megatron_lazarus.config import load_config
from megatron_lazarus.models.data import DataConfig, parse_data_path
from megatron_lazarus.models.gpt import GPTConfig

MODEL_ARGUMENTS = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "ffn_hidden_size",
    "seq_length",
    "max_position_embeddings",
    "position_embedding_type",
    "rotary_percent",
    "rotary_base",
    "swiglu",
    "normalization",
    "layernorm_epsilon",
    "hidden_dropout",
    "attention_dropout",
    "init_method_std",
    "untie_embeddings_and_output_weights",
    "seed",
    "num_experts",
    "topk",
    "expert_interval",
    "mlp_type",
    "moe_loss_coeff",
    "moe_z_loss_coeff",
    "moe_train_capacity_factor",
    "moe_eval_capacity_factor",
    "moe_min_capacity",
    "moe_drop_tokens",
    "moe_top2_2nd_expert_sampling",
    "moe_router_bias_update_rate",
    "max_tokens_per_expert_chunk",
)


def model_config(args: argparse.Namespace, vocab_size: int) -> GPTConfig:
    """Return the model's configuration; ``vocab_size`` is the padded one."""
    return GPTConfig(
        vocab_size=vocab_size,
        moe_router=args.moe_router_score_function,
        recompute=args.recompute_granularity or ("selective" if args.recompute_activations else None),
        **{name: getattr(args, name) for name in MODEL_ARGUMENTS},
    )


def data_config(args: argparse.Namespace) -> DataConfig:
    """Return what data to read; raises ValueError for a ``--data-path`` or ``--split`` that cannot be read."""
    prefixes, weights = parse_data_path(args.data_path)
    try:
        shares = [float(share) for share in args.split.replace("/", ",").split(",")]
    except ValueError:
        shares = []
    if len(shares) != 3 or min(shares) < 0 or not shares[0] > 0 or not math.isfinite(sum(shares)):
        raise ValueError(f"--split is {args.split!r}; give three shares such as 949,50,1, the first above 0")
    cache = Path(args.data_cache_path) if args.data_cache_path else Path(prefixes[0]).parent / "index_cache"
    return DataConfig(
        prefixes=prefixes,
        weights=weights,
        split=",".join(str(share) for share in shares),
        seq_length=args.seq_length,
        seed=args.seed,
        cache=cache,
        mmap=not args.no_mmap_bin_files,
    )


def deepspeed_config(args: argparse.Namespace) -> dict[str, Any]:
    """Return the JSON completed from the arguments, and fill the arguments that default to the JSON.

    Where both give a value they must agree. Raises ValueError naming both otherwise, or if the file cannot be read or
    the batch sizes do not fit.
    """
    config = load_config(args.deepspeed_config) if args.deepspeed_config else {}
    for name, key in (
        ("global_batch_size", "train_batch_size"),
        ("micro_batch_size", "train_micro_batch_size_per_gpu"),
    ):
        value = _agreed(f"--{name.replace('_', '-')}", getattr(args, name), key, config.get(key))
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"--{name.replace('_', '-')} (or {key} in the JSON) is {value}; give a positive integer")
        setattr(args, name, value)
        config[key] = value
    if args.global_batch_size % args.micro_batch_size:
        raise ValueError(
            f"--global-batch-size is {args.global_batch_size}; it must be a multiple of --micro-batch-size "
            f"({args.micro_batch_size})"
        )
    _settle_precision(args, config)
    config.setdefault("gradient_clipping", args.clip_grad)
    config.setdefault("steps_per_print", 2**31 - 1)
    if args.tensorboard_dir:
        config.setdefault(
            "tensorboard", {"enabled": True, "output_path": args.tensorboard_dir, "job_name": "pretrain_gpt"}
        )
    return config


def build_optimizer(args: argparse.Namespace, model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer over all parameters; biases and norms (one dimension) have no weight decay."""
    groups = parameter_groups(args, model)
    if args.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=args.lr, momentum=args.sgd_momentum)
    return torch.optim.AdamW(groups, lr=args.lr, betas=(args.adam_beta1, args.adam_beta2), eps=args.adam_eps)


def parameter_groups(args: argparse.Namespace, model: nn.Module) -> list[dict[str, Any]]:
    """Return the two parameter groups, with weight decay and without."""
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    return [{"params": decayed, "weight_decay": args.weight_decay}, {"params": others, "weight_decay": 0.0}]


def learning_rate_factor(args: argparse.Namespace) -> Callable[[int], float]:
    """Return a function: optimizer steps done -> learning rate as a share of ``--lr``.

    Linear warmup from 0, then constant, linear or cosine decay to ``--min-lr`` at ``--lr-decay-iters``.
    """
    warmup, floor, style = args.lr_warmup_iters, args.min_lr / args.lr, args.lr_decay_style
    end = args.lr_decay_iters if args.lr_decay_iters is not None else args.train_iters

    def factor(step: int) -> float:
        if warmup and step <= warmup:
            return step / warmup
        if style == "constant":
            return 1.0
        if step > end:
            return floor
        progress = (step - warmup) / (end - warmup)
        share = 1.0 - progress if style == "linear" else 0.5 * (math.cos(math.pi * progress) + 1.0)
        return floor + (1.0 - floor) * share

    return factor


def tera_flops_per_step(config: GPTConfig, global_batch_size: int) -> float:
    """Floating-point operations of one step, in units of 1e12, multiply and add counted as two.

    Matrix products only, backward counted as twice the forward, attention as if it were not causal, as is usual.
    """
    hidden, ffn = config.hidden_size, config.expert_ffn_hidden_size
    groups = config.num_query_groups or config.num_attention_heads
    attention = 2 * hidden * hidden * (2 + 2 * groups / config.num_attention_heads) + 4 * config.seq_length * hidden
    mlp = 2 * hidden * ffn * (3 if config.swiglu else 2)
    moe_layers = len(config.moe_layer_numbers)
    active = config.num_layers - moe_layers + moe_layers * (config.topk + (config.mlp_type == "residual"))
    layers = config.num_layers * attention + active * mlp
    passes = 4 if config.recompute == "full" else 3
    per_token = passes * layers + 3 * 2 * hidden * config.vocab_size
    return per_token * global_batch_size * config.seq_length / 1e12


def _agreed(option: str, argument: Any, key: str, value: Any) -> Any:
    if argument is not None and isinstance(value, int) and argument != value:
        raise ValueError(f"{option} is {argument} but {key} in the DeepSpeed JSON is {value}; make them equal")
    return argument if argument is not None else value


def _settle_precision(args: argparse.Namespace, config: dict[str, Any]) -> None:
    section = config.get("bf16", {})
    in_json = bool(section.get("enabled", False))
    if "enabled" in section and args.bf16 and not in_json:
        raise ValueError("--bf16 is given but bf16.enabled in the DeepSpeed JSON is false; make them agree")
    if in_json and (args.fp32 or args.float64):
        raise ValueError("--fp32 or --float64 is given but bf16.enabled in the DeepSpeed JSON is true; make them agree")
    args.bf16 = args.bf16 or in_json
    if args.bf16:
        config["bf16"] = {**section, "enabled": True}
