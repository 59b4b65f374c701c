"""GPT with MoE layers, from Megatron Core's blocks, for any device and without model parallelism."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional

from megatron_lazarus.models import megatron as mcore
from megatron_lazarus.models.attention import DeviceRotaryEmbedding, SDPACoreAttention
from megatron_lazarus.models.experts import ExpertFactory, MoESlot
from megatron_lazarus.models.parallel_state import solo_groups
from megatron_lazarus.models.recompute import checkpointed


@dataclass(frozen=True)
class GPTConfig:
    """Everything that makes the model. Sizes are in elements, sequence lengths in tokens.

    ``num_experts`` 1 builds a dense model; else every ``expert_interval``-th layer, counted from 1, holds experts.
    ``vocab_size`` is the padded one. ``recompute`` is what is computed again in the backward: nothing, the core
    attention ("selective") or every layer ("full").
    """

    vocab_size: int
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    seq_length: int
    max_position_embeddings: int
    ffn_hidden_size: int | None = None
    num_query_groups: int | None = None
    position_embedding_type: Literal["learned_absolute", "rope"] = "learned_absolute"
    rotary_percent: float = 1.0
    rotary_base: int = 10000
    swiglu: bool = False
    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    layernorm_epsilon: float = 1e-5
    hidden_dropout: float = 0.1
    attention_dropout: float = 0.1
    init_method_std: float = 0.02
    untie_embeddings_and_output_weights: bool = False
    recompute: Literal["selective", "full"] | None = None
    seed: int = 1234
    num_experts: int = 1
    topk: int = 1
    expert_interval: int = 2
    mlp_type: Literal["standard", "residual"] = "standard"
    moe_loss_coeff: float = 0.1
    moe_z_loss_coeff: float = 0.0
    moe_train_capacity_factor: float = 1.0
    moe_eval_capacity_factor: float = 1.0
    moe_min_capacity: int = 4
    moe_drop_tokens: bool = True
    moe_top2_2nd_expert_sampling: bool = True
    moe_use_rts: bool = True
    moe_noisy_gate_policy: str | None = None
    moe_router: Literal["softmax", "sigmoid"] = "softmax"
    moe_router_bias_update_rate: float = 0.0
    max_tokens_per_expert_chunk: int | None = None

    @property
    def expert_ffn_hidden_size(self) -> int:
        """Inner width of an expert and of a dense MLP: as given, else 4 times hidden (SwiGLU: 8/3, down to a 64)."""
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        return max(64, self.hidden_size * 8 // 3 // 64 * 64) if self.swiglu else 4 * self.hidden_size

    def is_moe_layer(self, layer_number: int) -> bool:
        """Tell whether the layer, numbered from 1, holds experts."""
        return self.num_experts > 1 and layer_number % self.expert_interval == 0

    @property
    def moe_layer_numbers(self) -> tuple[int, ...]:
        """Numbers, from 1, of the layers with experts."""
        return tuple(number for number in range(1, self.num_layers + 1) if self.is_moe_layer(number))


MoEFactory = Callable[..., nn.Module]


class PretrainGPT(nn.Module):
    """The model to train: GPT and its loss.

    It is built in fp32 on the CPU, from ``config.seed`` alone, and holds no process group, but Megatron Core wants
    ``torch.distributed`` initialised (any back end, any world): raises RuntimeError if it is not. Dropout draws from
    torch's default generators. ``moe_layer`` replaces the class of the MoE layers (same arguments as ``MoELayer``).
    """

    def __init__(self, config: GPTConfig, moe_layer: MoEFactory | None = None) -> None:
        super().__init__()
        if not torch.distributed.is_initialized():
            raise RuntimeError("PretrainGPT needs torch.distributed to be initialised; a world of one will do")
        self.config = config
        with torch.random.fork_rng(devices=[]), mcore.quiet_build():
            torch.default_generator.manual_seed(config.seed)
            self.gpt = _GPT(config, moe_layer or _default_moe_layer())

    def forward(
        self,
        tokens: torch.Tensor,
        labels: torch.Tensor,
        loss_mask: torch.Tensor,
        position_ids: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the loss of a micro-batch and what to log of it.

        All arguments are [batch, sequence]; ``loss_mask`` weighs the tokens. The loss is a scalar in nats per token:
        the weighted mean of the cross entropy (0 for a mask of zeros). The auxiliary loss of the MoE layers is
        attached to the graph inside them; it is in the second value only to be logged: "lm loss", and with experts
        "moe loss", both detached.
        """
        if position_ids is None:
            position_ids = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        token_losses = self.gpt(tokens, position_ids, attention_mask=None, labels=labels)
        weights = loss_mask.to(token_losses.dtype)
        loss = (token_losses * weights).sum() / weights.sum().clamp(min=1.0)
        metrics = {"lm loss": loss.detach()}
        slots = [module for module in self.gpt.modules() if isinstance(module, MoESlot)]
        if slots:
            aux_loss = torch.stack([slot.take_aux_loss() for slot in slots]).sum()
            metrics["moe loss"] = aux_loss * self.config.moe_loss_coeff
        return loss, metrics


class _GPT(mcore.GPTModel):
    def __init__(self, config: GPTConfig, moe_layer: MoEFactory) -> None:
        groups = solo_groups()
        super().__init__(
            config=_transformer_config(config),
            transformer_layer_spec=_block_spec(config, moe_layer),
            vocab_size=config.vocab_size,
            max_sequence_length=config.max_position_embeddings,
            position_embedding_type=config.position_embedding_type,
            rotary_percent=config.rotary_percent,
            rotary_base=config.rotary_base,
            share_embeddings_and_output_weights=not config.untie_embeddings_and_output_weights,
            pg_collection=groups,
        )
        if config.position_embedding_type == "rope":
            self.rotary_pos_emb = DeviceRotaryEmbedding(
                kv_channels=self.config.kv_channels,
                rotary_percent=config.rotary_percent,
                rotary_base=config.rotary_base,
                use_cpu_initialization=True,
                cp_group=groups.cp,
            )

    def compute_language_model_loss(self, labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Cross entropy [batch, sequence] of logits [sequence, batch, vocabulary].

        Megatron Core's vocabulary-parallel loss goes through fp32 always, which would cut a float64 run short.
        """
        if logits.dtype in (torch.bfloat16, torch.float16):
            logits = logits.float()
        losses = functional.cross_entropy(logits.flatten(end_dim=1), labels.t().flatten(), reduction="none")
        return losses.view(logits.shape[:2]).t()


class _Layer(mcore.TransformerLayer):
    def __init__(self, *args: Any, recompute: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.recompute = recompute

    def forward(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run the layer, under recomputation if asked for."""
        run = super().forward
        if self.recompute and self.training and torch.is_grad_enabled():
            run = checkpointed(run)
        return run(*args, **kwargs)


def _default_moe_layer() -> MoEFactory:
    from megatron_lazarus.moe.layer import MoELayer

    return MoELayer


def _transformer_config(config: GPTConfig) -> Any:
    return mcore.TransformerConfig(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_query_groups,
        ffn_hidden_size=config.expert_ffn_hidden_size,
        gated_linear_unit=config.swiglu,
        activation_func=functional.silu if config.swiglu else functional.gelu,
        normalization=config.normalization,
        layernorm_epsilon=config.layernorm_epsilon,
        hidden_dropout=config.hidden_dropout,
        attention_dropout=config.attention_dropout,
        init_method_std=config.init_method_std,
        use_cpu_initialization=True,
    )


def _block_spec(config: GPTConfig, moe_layer: MoEFactory) -> Any:
    return mcore.TransformerBlockSubmodules(
        layer_specs=[_layer_spec(config, moe_layer, number) for number in range(1, config.num_layers + 1)],
        layer_norm=mcore.WrappedTorchNorm,
    )


def _layer_spec(config: GPTConfig, moe_layer: MoEFactory, layer_number: int) -> Any:
    # The norm is named: Megatron Core's own choice changes with whatever package called apex can be imported.
    return mcore.ModuleSpec(
        module=_Layer,
        params={"recompute": config.recompute == "full"},
        submodules=mcore.TransformerLayerSubmodules(
            input_layernorm=mcore.WrappedTorchNorm,
            self_attention=mcore.ModuleSpec(
                module=mcore.SelfAttention,
                params={"attn_mask_type": mcore.AttnMaskType.causal},
                submodules=mcore.SelfAttentionSubmodules(
                    linear_qkv=mcore.ColumnParallelLinear,
                    core_attention=partial(SDPACoreAttention, recompute=config.recompute == "selective"),
                    linear_proj=mcore.RowParallelLinear,
                ),
            ),
            self_attn_bda=mcore.get_bias_dropout_add,
            pre_mlp_layernorm=mcore.WrappedTorchNorm,
            mlp=_mlp_spec(config, moe_layer, layer_number),
            mlp_bda=mcore.get_bias_dropout_add,
        ),
    )


def _mlp_spec(config: GPTConfig, moe_layer: MoEFactory, layer_number: int) -> Any:
    if not config.is_moe_layer(layer_number):
        return mcore.ModuleSpec(
            module=mcore.MLP,
            submodules=mcore.MLPSubmodules(linear_fc1=mcore.ColumnParallelLinear, linear_fc2=mcore.RowParallelLinear),
        )
    build = partial(
        moe_layer,
        hidden_size=config.hidden_size,
        expert=ExpertFactory(
            hidden_size=config.hidden_size,
            ffn_hidden_size=config.expert_ffn_hidden_size,
            swiglu=config.swiglu,
            init_std=config.init_method_std,
            # A residual stream that sums 2 outputs per layer keeps its variance if each is scaled down so.
            output_init_std=config.init_method_std / math.sqrt(2 * config.num_layers),
            seed=config.seed,
            layer=layer_number,
        ),
        num_experts=config.num_experts,
        k=config.topk,
        capacity_factor=config.moe_train_capacity_factor,
        eval_capacity_factor=config.moe_eval_capacity_factor,
        min_capacity=config.moe_min_capacity,
        use_residual=config.mlp_type == "residual",
        noisy_gate_policy=config.moe_noisy_gate_policy,
        drop_tokens=config.moe_drop_tokens,
        use_rts=config.moe_use_rts,
        top2_2nd_expert_sampling=config.moe_top2_2nd_expert_sampling,
        aux_loss_coefficient=config.moe_loss_coeff,
        z_loss_coefficient=config.moe_z_loss_coeff,
        router=config.moe_router,
        expert_bias_update_rate=config.moe_router_bias_update_rate,
        max_tokens_per_expert_chunk=config.max_tokens_per_expert_chunk,
    )
    return mcore.ModuleSpec(module=MoESlot, params={"build": build})
