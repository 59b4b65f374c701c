"""The command line of pretrain_gpt: names and defaults as Megatron-DeepSpeed users know them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from megatron_lazarus.models.tokenizer import BYTE_LEVEL, TOKENIZER_TYPES

# Other values than these are refused, each with its reason.
_REFUSED: dict[str, tuple[object, str]] = {
    "tensor_model_parallel_size": (1, "tensor parallelism is not supported"),
    "pipeline_model_parallel_size": (1, "pipeline parallelism is not supported"),
    "context_parallel_size": (1, "context parallelism is not supported"),
    "sequence_parallel": (False, "sequence parallelism is not supported"),
    "fp16": (False, "fp16 is not supported; use --bf16"),
    "zero_stage": (0, "the dense part runs at ZeRO stage 0"),
    "enable_expert_tensor_parallelism": (False, "tensor parallelism is not supported"),
    "use_tutel": (False, "the MoE layer has its own dispatch"),
    "use_distributed_optimizer": (False, "the optimizer state of the dense part is not sharded"),
    "universal_checkpoint": (False, "checkpoints load at any world size as they are"),
}
_POSITIVE = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "seq_length",
    "max_position_embeddings",
    "train_iters",
    "topk",
    "expert_interval",
    "moe_min_capacity",
    "log_interval",
    "eval_interval",
    "make_vocab_size_divisible_by",
)


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; argparse's own errors leave the process with status 2."""
    parser = argparse.ArgumentParser(description="Pretrain a GPT with mixture-of-experts layers.", allow_abbrev=False)
    _model_arguments(parser)
    _moe_arguments(parser)
    _training_arguments(parser)
    _optimizer_arguments(parser)
    _data_arguments(parser)
    _checkpoint_arguments(parser)
    _runtime_arguments(parser)
    _refused_arguments(parser)
    return parser.parse_args(argv)


def check_arguments(args: argparse.Namespace) -> None:
    """Raise one ValueError, naming option, value and what would be legal, if the arguments contradict each other.

    Needs no process group. Makes ``num_experts`` a single number.
    """
    for name, (allowed, reason) in _REFUSED.items():
        if getattr(args, name) != allowed:
            raise ValueError(f"{_option(name)}: {reason}")
    if len(set(args.num_experts)) != 1:
        raise ValueError(f"--num-experts is {args.num_experts}; all MoE layers must have the same number")
    args.num_experts = args.num_experts[0]
    for name in (*_POSITIVE, "num_experts"):
        if getattr(args, name) < 1:
            raise ValueError(f"{_option(name)} is {getattr(args, name)}; it must be at least 1")
    _check_model(args)
    _check_moe(args)
    _check_training(args)


def _check_model(args: argparse.Namespace) -> None:
    if args.hidden_size % args.num_attention_heads:
        raise ValueError(
            f"--hidden-size is {args.hidden_size}; it must be a multiple of --num-attention-heads "
            f"({args.num_attention_heads})"
        )
    if args.num_query_groups is not None and (
        args.num_query_groups < 1 or args.num_attention_heads % args.num_query_groups
    ):
        raise ValueError(
            f"--num-query-groups is {args.num_query_groups}; it must divide --num-attention-heads "
            f"({args.num_attention_heads})"
        )
    head_size = args.hidden_size // args.num_attention_heads
    if args.position_embedding_type == "rope" and (head_size % 2 or not 0 < args.rotary_percent <= 1):
        raise ValueError(
            f"--position-embedding-type rope needs an even head size (it is {head_size}) and "
            f"0 < --rotary-percent <= 1 (it is {args.rotary_percent})"
        )
    if args.seq_length > args.max_position_embeddings:
        raise ValueError(
            f"--seq-length is {args.seq_length}; it must not exceed --max-position-embeddings "
            f"({args.max_position_embeddings})"
        )
    for name in ("hidden_dropout", "attention_dropout"):
        if not 0 <= getattr(args, name) < 1:
            raise ValueError(f"{_option(name)} is {getattr(args, name)}; it must be in [0, 1)")


def _check_moe(args: argparse.Namespace) -> None:
    if args.num_experts == 1:
        return
    if args.topk > args.num_experts:
        raise ValueError(f"--topk is {args.topk}; it must not exceed --num-experts ({args.num_experts})")
    if args.expert_interval > args.num_layers:
        raise ValueError(
            f"--expert-interval is {args.expert_interval}; with --num-layers {args.num_layers} no layer would hold "
            f"the {args.num_experts} experts"
        )
    for name in ("moe_train_capacity_factor", "moe_eval_capacity_factor"):
        if not getattr(args, name) > 0:
            raise ValueError(f"{_option(name)} is {getattr(args, name)}; it must be above 0")
    for name in ("moe_loss_coeff", "moe_z_loss_coeff", "moe_router_bias_update_rate"):
        if not getattr(args, name) >= 0:
            raise ValueError(f"{_option(name)} is {getattr(args, name)}; it must not be negative")
    if args.moe_router_bias_update_rate and args.moe_router_score_function != "sigmoid":
        raise ValueError("--moe-router-bias-update-rate needs --moe-router-score-function sigmoid")


def _check_training(args: argparse.Namespace) -> None:
    if args.fp32 + args.bf16 + args.float64 > 1:
        raise ValueError("--fp32, --bf16 and --float64 exclude each other")
    if not args.lr > 0 or not 0 <= args.min_lr <= args.lr:
        raise ValueError(f"--lr is {args.lr} and --min-lr {args.min_lr}; 0 <= min-lr <= lr and lr > 0 must hold")
    decay = args.lr_decay_iters if args.lr_decay_iters is not None else args.train_iters
    if args.lr_warmup_fraction is not None:
        if args.lr_warmup_iters or not 0 <= args.lr_warmup_fraction < 1:
            raise ValueError("--lr-warmup-fraction must be in [0, 1) and excludes --lr-warmup-iters")
        args.lr_warmup_iters = int(args.lr_warmup_fraction * decay)
    if not 0 <= args.lr_warmup_iters < decay:
        raise ValueError(f"--lr-warmup-iters is {args.lr_warmup_iters}; it must be below --lr-decay-iters ({decay})")
    if args.eval_iters < 0:
        raise ValueError(f"--eval-iters is {args.eval_iters}; it must not be negative")
    if args.save_interval is not None and (args.save_interval < 1 or not args.save):
        raise ValueError("--save-interval must be at least 1 and needs --save")
    if args.clip_grad < 0:
        raise ValueError(f"--clip-grad is {args.clip_grad}; it must not be negative (0 turns it off)")


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _model_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument("--num-layers", type=int, required=True)
    group.add_argument("--hidden-size", type=int, required=True)
    group.add_argument("--num-attention-heads", type=int, required=True)
    group.add_argument("--num-query-groups", type=int, help="heads of keys and values; default: all")
    group.add_argument(
        "--ffn-hidden-size", type=int, help="of dense layers and of each expert; default: 4 x hidden size"
    )
    group.add_argument("--seq-length", type=int, required=True, help="tokens")
    group.add_argument("--max-position-embeddings", type=int, required=True)
    group.add_argument("--position-embedding-type", choices=("learned_absolute", "rope"), default="learned_absolute")
    group.add_argument("--rotary-percent", type=float, default=1.0)
    group.add_argument("--rotary-base", type=int, default=10000)
    group.add_argument("--swiglu", action="store_true")
    group.add_argument("--normalization", choices=("LayerNorm", "RMSNorm"), default="LayerNorm")
    group.add_argument("--layernorm-epsilon", type=float, default=1e-5)
    group.add_argument("--hidden-dropout", type=float, default=0.1)
    group.add_argument("--attention-dropout", type=float, default=0.1)
    group.add_argument("--init-method-std", type=float, default=0.02)
    group.add_argument("--untie-embeddings-and-output-weights", action="store_true")
    group.add_argument("--make-vocab-size-divisible-by", type=int, default=128)


def _moe_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("mixture of experts")
    group.add_argument("--num-experts", type=int, nargs="+", default=[1])
    group.add_argument("--topk", type=int, default=1)
    group.add_argument("--expert-interval", type=int, default=2, help="every n-th layer, from the n-th, holds experts")
    group.add_argument("--mlp-type", choices=("standard", "residual"), default="standard")
    group.add_argument("--moe-loss-coeff", type=float, default=0.1)
    group.add_argument("--moe-z-loss-coeff", type=float, default=0.0)
    group.add_argument("--moe-train-capacity-factor", type=float, default=1.0)
    group.add_argument("--moe-eval-capacity-factor", type=float, default=1.0)
    group.add_argument("--moe-min-capacity", type=int, default=4)
    group.add_argument("--disable-moe-token-dropping", dest="moe_drop_tokens", action="store_false")
    group.add_argument(
        "--disable-moe-top2-2nd-expert-sampling", dest="moe_top2_2nd_expert_sampling", action="store_false"
    )
    group.add_argument("--moe-router-score-function", choices=("softmax", "sigmoid"), default="softmax")
    group.add_argument("--moe-router-bias-update-rate", type=float, default=0.0)
    group.add_argument(
        "--max-tokens-per-expert-chunk", type=int, help="bounds memory: an expert computes at most so many at once"
    )
    for name in ("--moe-expert-parallel-size", "--num-experts-switch", "--num-experts-teacher"):
        group.add_argument(name, help="accepted and ignored: experts are placed as the lazarus section says")
    group.add_argument("--create-moe-param-group", action="store_true", help="accepted and ignored")


def _training_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("training")
    group.add_argument("--micro-batch-size", type=int, help="default: from the DeepSpeed JSON")
    group.add_argument("--global-batch-size", type=int, help="default: from the DeepSpeed JSON")
    group.add_argument("--train-iters", type=int, required=True)
    group.add_argument("--seed", type=int, default=1234)
    group.add_argument("--fp32", action="store_true")
    group.add_argument("--bf16", action="store_true")
    group.add_argument("--float64", action="store_true", help="for comparisons")
    group.add_argument("--recompute-activations", action="store_true", help="same as --recompute-granularity selective")
    group.add_argument("--recompute-granularity", choices=("selective", "full"))
    group.add_argument("--log-interval", type=int, default=100)
    group.add_argument("--eval-interval", type=int, default=1000)
    group.add_argument("--eval-iters", type=int, default=100, help="global batches of an evaluation; 0 turns it off")
    group.add_argument("--exit-interval", type=int)
    group.add_argument("--exit-duration-in-mins", type=float)
    group.add_argument("--exit-signal-handler", action="store_true", help="on SIGTERM save and exit")
    group.add_argument("--kill-switch-file", help="exit when this file exists")
    group.add_argument("--log-unigram-entropy", action="store_true", help="print it beside the last validation loss")
    group.add_argument("--tensorboard-dir")


def _optimizer_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("optimizer")
    group.add_argument("--optimizer", choices=("adam", "sgd"), default="adam")
    group.add_argument("--lr", type=float, required=True)
    group.add_argument("--min-lr", type=float, default=0.0)
    group.add_argument("--lr-decay-style", choices=("constant", "linear", "cosine"), default="linear")
    group.add_argument("--lr-decay-iters", type=int, help="default: --train-iters")
    group.add_argument("--lr-warmup-iters", type=int, default=0)
    group.add_argument("--lr-warmup-fraction", type=float)
    group.add_argument("--weight-decay", type=float, default=0.01)
    group.add_argument("--clip-grad", type=float, default=1.0)
    group.add_argument("--adam-beta1", type=float, default=0.9)
    group.add_argument("--adam-beta2", type=float, default=0.999)
    group.add_argument("--adam-eps", type=float, default=1e-8)
    group.add_argument("--sgd-momentum", type=float, default=0.9)


def _data_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("data")
    group.add_argument("--data-path", nargs="+", required=True, help="PREFIX, or WEIGHT PREFIX WEIGHT PREFIX …")
    group.add_argument("--split", default="949,50,1", help="shares of train, validation and test")
    group.add_argument("--data-cache-path", help="folder for sample indices; default: index_cache beside the data")
    group.add_argument("--no-mmap-bin-files", action="store_true")
    group.add_argument("--tokenizer-type", choices=TOKENIZER_TYPES, default=BYTE_LEVEL)
    group.add_argument("--tokenizer-model")
    group.add_argument("--vocab-file")
    group.add_argument("--merge-file")


def _checkpoint_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("checkpoints")
    group.add_argument("--save")
    group.add_argument("--load")
    group.add_argument("--save-interval", type=int)
    group.add_argument("--no-load-optim", action="store_true")
    group.add_argument("--finetune", action="store_true", help="load weights only and start at iteration 0")


def _runtime_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("DeepSpeed")
    group.add_argument("--deepspeed", action="store_true", help="accepted: training always runs under DeepSpeed")
    group.add_argument("--deepspeed_config", "--deepspeed-config", help="path of the JSON")
    group.add_argument("--local_rank", "--local-rank", type=int)
    group.add_argument("--no-pipeline-parallel", action="store_true", help="accepted: there is none")


def _refused_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("known but not supported")
    for name, (allowed, reason) in _REFUSED.items():
        if isinstance(allowed, bool):
            group.add_argument(_option(name), action="store_true", help=reason)
        else:
            group.add_argument(_option(name), type=int, default=allowed, help=reason)
