"""Experts, and the MoE layer in the MLP slot of a Megatron Core transformer layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import skip_init


@dataclass(frozen=True)
class ExpertFactory:
    """Builds expert number ``index`` of one layer, with weights that depend on (seed, layer, index) only.

    So a rank that builds some experts and a rank that builds others agree on each, at any world size, and torch's
    default generator does not move.
    """

    hidden_size: int
    ffn_hidden_size: int
    swiglu: bool
    init_std: float
    output_init_std: float
    seed: int
    layer: int

    def __call__(self, index: int) -> Expert:
        """Return a new expert in fp32 on the CPU; ``index`` may be any integer."""
        expert = Expert(self.hidden_size, self.ffn_hidden_size, self.swiglu)
        key = np.random.SeedSequence([self.seed % 2**32, self.layer, index % 2**32]).generate_state(1, np.uint64)[0]
        generator = torch.Generator().manual_seed(int(key) % 2**63)
        with torch.no_grad():
            expert.fc1.weight.normal_(0.0, self.init_std, generator=generator)
            expert.fc2.weight.normal_(0.0, self.output_init_std, generator=generator)
            expert.fc1.bias.zero_()
            expert.fc2.bias.zero_()
        return expert


class Expert(nn.Module):
    """A feed-forward network: two linear maps with bias around gelu, or around SwiGLU."""

    def __init__(self, hidden_size: int, ffn_hidden_size: int, swiglu: bool) -> None:
        super().__init__()
        self.swiglu = swiglu
        self.fc1 = skip_init(nn.Linear, hidden_size, ffn_hidden_size * (2 if swiglu else 1))
        self.fc2 = skip_init(nn.Linear, ffn_hidden_size, hidden_size)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map [..., hidden] to [..., hidden]."""
        inner = self.fc1(hidden)
        if self.swiglu:
            gate, value = inner.chunk(2, dim=-1)
            inner = functional.silu(gate) * value
        else:
            inner = functional.gelu(inner)
        return self.fc2(inner)


class MoESlot(nn.Module):
    """A MoE layer that answers as Megatron Core's MLP does."""

    def __init__(self, config: Any, build: Callable[[], nn.Module], submodules: Any = None) -> None:
        super().__init__()
        self.moe = build()
        self._aux_loss: torch.Tensor | None = None

    def forward(self, hidden_states: torch.Tensor, padding_mask: Any = None) -> tuple[torch.Tensor, None]:
        """Map [sequence, batch, hidden] to (the same shape, no bias)."""
        output, aux_loss, _ = self.moe(hidden_states)
        self._aux_loss = aux_loss.detach()
        return output, None

    def take_aux_loss(self) -> torch.Tensor:
        """Return the unscaled auxiliary loss of the last forward, detached, once; raises RuntimeError without one."""
        if self._aux_loss is None:
            raise RuntimeError("take_aux_loss() needs a forward before it")
        aux_loss, self._aux_loss = self._aux_loss, None
        return aux_loss
