"""Core attention and rotary embedding that run on any device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from megatron_lazarus.models.megatron import AttnMaskType, RotaryEmbedding, TransformerConfig
from megatron_lazarus.models.recompute import checkpointed


class SDPACoreAttention(nn.Module):
    """Scaled dot product attention through torch, in Megatron Core's core-attention slot.

    Megatron Core's own module asks CUDA for a scratch buffer and for RNG states even on CPU. Dropout is drawn from
    torch's default generator, so reseeding that is enough to reproduce it.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        recompute: bool = False,
    ) -> None:
        super().__init__()
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.scale = softmax_scale
        self.recompute = recompute

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        """Attend.

        ``query`` is [sequence, batch, heads, head size]; ``key`` and ``value`` may have fewer heads (grouped queries).
        Without ``attention_mask`` attention is causal, else True in the mask [batch or 1, 1, sequence, sequence] hides
        a position (Megatron's sense). Returns [sequence, batch, heads * head size]. Raises ValueError for packed
        sequences and for an attention bias.
        """
        if packed_seq_params is not None or attention_bias is not None:
            raise ValueError("SDPACoreAttention supports neither packed sequences nor an attention bias")
        attend: Callable[..., torch.Tensor] = self._attend
        if self.recompute and self.training and torch.is_grad_enabled():
            attend = checkpointed(attend)
        return attend(query, key, value, attention_mask)

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        context = functional.scaled_dot_product_attention(
            query.permute(1, 2, 0, 3),
            key.permute(1, 2, 0, 3),
            value.permute(1, 2, 0, 3),
            attn_mask=None if mask is None else ~mask,
            is_causal=mask is None,
            dropout_p=self.dropout if self.training else 0.0,
            scale=self.scale,
            enable_gqa=query.shape[2] != key.shape[2],
        )
        return context.permute(2, 0, 1, 3).flatten(start_dim=2)


class DeviceRotaryEmbedding(RotaryEmbedding):
    """Rotary positions that stay on the model's device.

    Megatron Core's class moves its frequencies to the current CUDA device at the first forward and caches the table
    by sequence length only, so a table made on one device would be served on another.
    """

    inv_freq: torch.Tensor

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> DeviceRotaryEmbedding:
        super()._apply(fn, recurse)
        # The frequencies follow the device but keep their precision: in bf16 far positions would coincide.
        self.inv_freq = self.inv_freq.to(fn(torch.empty_like(self.inv_freq)).device)
        return self

    def forward(
        self, max_seq_len: int, offset: int = 0, packed_seq: bool = False, cp_group: Any = None
    ) -> torch.Tensor:
        """Return the angles, [max_seq_len, 1, 1, rotary size] in fp32, of positions ``offset`` and up."""
        angles = self.get_freqs_non_repeated(max_seq_len, offset)
        angles = angles.repeat_interleave(2, dim=-1) if self.rotary_interleaved else torch.cat((angles, angles), dim=-1)
        return angles[:, None, None, :]
