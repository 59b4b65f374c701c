"""A small MoE model and its data, built alike for stock DeepSpeed, for Lazarus and for plain references."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

HIDDEN, CLASSES = 16, 11


class Expert(nn.Module):
    """An MLP with biases, so that a record holds tensors of several shapes."""

    def __init__(self, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, 2 * hidden)
        self.down = nn.Linear(2 * hidden, hidden)

    def forward(self, rows: Tensor) -> Tensor:
        result: Tensor = self.down(F.gelu(self.up(rows)))
        return result


def expert_values(layer: int, expert: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Initial weights of one expert, the same wherever it is built."""
    generator = torch.Generator().manual_seed(1000 * layer + expert + 1)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).mul(0.3).to(dtype)
        for name, shape in (
            ("up.weight", (2 * HIDDEN, HIDDEN)),
            ("up.bias", (2 * HIDDEN,)),
            ("down.weight", (HIDDEN, 2 * HIDDEN)),
            ("down.bias", (HIDDEN,)),
        )
    }


def make_expert(layer: int) -> Callable[[int], nn.Module]:
    """``build(index)`` makes expert ``index`` of ``layer``."""

    def build(index: int) -> nn.Module:
        expert = Expert()
        expert.load_state_dict(expert_values(layer, index, torch.get_default_dtype()))
        return expert

    return build


class TinyMoE(nn.Module):
    """Embedding, two residual blocks of (dense with dropout, MoE), classifier; returns (loss, metrics).

    ``make_moe(layer)`` builds an MoE layer with DeepSpeed's interface.
    """

    def __init__(
        self, make_moe: Callable[[int], nn.Module], dropout: float = 0.0, aux_coefficient: float = 0.0, layers: int = 2
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(CLASSES, HIDDEN)
        self.dense = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(layers))
        self.dropout = nn.Dropout(dropout)
        self.moe = nn.ModuleList(make_moe(layer) for layer in range(layers))
        self.head = nn.Linear(HIDDEN, CLASSES)
        self.aux_coefficient = aux_coefficient
        # Tokens of a micro-batch all differ: equal ones would tie for capacity, and rounding would choose.
        angles = torch.arange(64).unsqueeze(1) * torch.linspace(0.1, 1.0, HIDDEN)
        self.register_buffer("positions", torch.sin(angles), persistent=False)
        generator = torch.Generator().manual_seed(99)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if "experts" not in name:
                    values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                    parameter.copy_(values * 0.3)

    def forward(self, tokens: Tensor, labels: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        hidden = self.embed(tokens)
        hidden = hidden + self.positions[: tokens.numel()].view(hidden.shape).to(hidden.dtype)
        aux = hidden.new_zeros(())
        for dense, moe in zip(self.dense, self.moe, strict=True):
            hidden = hidden + self.dropout(torch.tanh(dense(hidden)))
            output, layer_aux, _ = moe(hidden)
            hidden = hidden + output
            aux = aux + layer_aux
        logits = self.head(hidden)
        loss = F.cross_entropy(logits.view(-1, CLASSES).double(), labels.view(-1)).to(logits.dtype)
        self.last_logits = logits.detach()
        return loss + self.aux_coefficient * aux, {"aux": aux.detach()}


def batch(step: int, micro_batch: int, samples: int = 2, length: int = 12) -> dict[str, Tensor]:
    """Micro-batch ``micro_batch`` of ``step``: tokens and labels [samples, length]."""
    generator = torch.Generator().manual_seed(7919 * step + micro_batch)
    tokens = torch.randint(0, CLASSES, (samples, length), generator=generator)
    return {"tokens": tokens, "labels": (tokens * 3 + 1) % CLASSES}


def lazarus_moe(num_experts: int, **options: Any) -> Callable[[int], nn.Module]:
    """``make_moe`` for our layer with the experts of ``expert_values``."""
    from megatron_lazarus.moe.layer import MoELayer

    return lambda layer: MoELayer(HIDDEN, make_expert(layer), num_experts, **options)
