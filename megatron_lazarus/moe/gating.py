"""The router: scores, top-k choice, capacity, auxiliary losses. Per micro-batch and local to its rank.

Routes, weights, dropped tokens and the auxiliary loss are those of ``deepspeed.moe.sharded_moe`` (0.19.8), so that a
model can move between the two; everything is computed in float32, or in float64 for float64 models.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributions import Distribution, Gumbel, Uniform
from torch.nn import functional as F

DROPPED = -1


@dataclass(frozen=True)
class GateSettings:
    """How tokens choose experts. Raises ValueError for values that no router can serve."""

    num_experts: int
    k: int = 1
    capacity_factor: float = 1.0
    eval_capacity_factor: float = 1.0
    min_capacity: int = 4
    noisy_gate_policy: Literal["Jitter", "RSample"] | None = None
    drop_tokens: bool = True
    use_rts: bool = True
    top2_2nd_expert_sampling: bool = True
    score_function: Literal["softmax", "sigmoid"] = "softmax"
    expert_bias_update_rate: float = 0.0
    z_loss_coefficient: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= self.k <= self.num_experts:
            raise ValueError(f"k (top-k) is {self.k}; with num_experts={self.num_experts} it must be 1..num_experts")
        if self.score_function not in ("softmax", "sigmoid"):
            raise ValueError(f"router is {self.score_function!r}; legal values are 'softmax' and 'sigmoid'")
        if self.noisy_gate_policy not in (None, "Jitter", "RSample"):
            raise ValueError(f"noisy_gate_policy is {self.noisy_gate_policy!r}; legal: None, 'Jitter', 'RSample'")
        if self.score_function == "sigmoid" and self.drop_tokens:
            raise ValueError("router 'sigmoid' routes without dropping; set drop_tokens=False")
        if self.expert_bias_update_rate and self.score_function != "sigmoid":
            raise ValueError(
                f"expert_bias_update_rate is {self.expert_bias_update_rate}; an expert bias needs router='sigmoid'"
            )


@dataclass(frozen=True)
class Routes:
    """Choices of T tokens: ``experts`` [T, k] int64 (DROPPED where none), ``weights`` [T, k], and the losses.

    ``wanted`` [experts] counts choices before any drop (DeepSpeed's ``exp_counts``).
    """

    experts: Tensor
    weights: Tensor
    aux_loss: Tensor
    z_loss: Tensor
    wanted: Tensor


class Gate(nn.Module):
    """Linear router over ``num_experts``; ``wg`` has DeepSpeed's name and shape."""

    expert_bias: Tensor | None

    def __init__(self, hidden_size: int, settings: GateSettings) -> None:
        super().__init__()
        self.settings = settings
        self.wg = nn.Linear(hidden_size, settings.num_experts, bias=False)
        bias = torch.zeros(settings.num_experts) if settings.expert_bias_update_rate else None
        self.register_buffer("expert_bias", bias)

    def forward(self, tokens: Tensor, used: Tensor | None = None) -> Routes:
        """Route ``tokens`` [T, H]; ``used`` [T] marks those that may reach an expert (default all)."""
        settings = self.settings
        scores_dtype = torch.float64 if tokens.dtype == torch.float64 else torch.float32
        inputs = tokens.to(scores_dtype)
        if settings.noisy_gate_policy == "Jitter" and self.training:
            inputs = inputs * _drawn(Uniform(inputs.new_tensor(0.99), inputs.new_tensor(1.01)), inputs)
        logits = F.linear(inputs, self.wg.weight.to(scores_dtype))
        z_loss = logits.new_zeros(())
        if settings.z_loss_coefficient:
            from megatron.core.transformer.moe.moe_utils import z_loss_func

            z_loss = z_loss_func(logits, settings.z_loss_coefficient)
        if settings.score_function == "sigmoid":
            experts, weights, gates, first = self._sigmoid(logits)
        else:
            experts, weights, gates, first = self._softmax(logits)
        if used is not None:
            experts = experts.masked_fill(~used.bool().view(-1, 1), DROPPED)
        wanted = _counts(experts, settings.num_experts)
        counted = experts[:, :1] if first else experts
        share = _counts(counted, settings.num_experts).to(gates.dtype) / max(1, tokens.shape[0] * counted.shape[1])
        aux_loss = (gates.mean(0) * share).sum() * settings.num_experts
        priority = None
        if settings.k == 1 and settings.use_rts:
            # DeepSpeed draws also where it drops nothing.
            priority = _drawn(Uniform(gates.new_tensor(0.0), gates.new_tensor(1.0)), gates)
        if settings.drop_tokens:
            experts = self._drop(experts, gates, priority)
        kept = experts >= 0
        weights = weights * kept
        if settings.k > 1 and settings.score_function == "softmax":
            weights = weights / weights.sum(1, keepdim=True).clamp(min=torch.finfo(weights.dtype).eps)
        return Routes(experts=experts, weights=weights, aux_loss=aux_loss, z_loss=z_loss, wanted=wanted)

    def update_expert_bias(self, tokens_per_expert: Tensor) -> None:
        """Auxiliary-loss-free balancing (arXiv 2408.15664): raise the bias of experts below the mean load."""
        if self.expert_bias is None:
            return
        load = tokens_per_expert.to(self.expert_bias.device, self.expert_bias.dtype)
        self.expert_bias.add_(torch.sign(load.mean() - load), alpha=self.settings.expert_bias_update_rate)

    def _softmax(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor, bool]:
        """Choices, raw weights, gate probabilities, and whether the aux loss counts first choices only."""
        settings = self.settings
        gates = F.softmax(logits, dim=1)
        if settings.k == 1:
            noisy = settings.noisy_gate_policy == "RSample" and self.training
            experts = torch.argmax(logits + _gumbel(logits) if noisy else gates, dim=1, keepdim=True)
        elif settings.k == 2:
            first = torch.argmax(gates, dim=1, keepdim=True)
            rest = logits + _gumbel(logits) if settings.top2_2nd_expert_sampling else logits
            second = torch.argmax(rest.scatter(1, first, float("-inf")), dim=1, keepdim=True)
            experts = torch.cat([first, second], dim=1)
        else:
            experts = torch.topk(gates, k=settings.k, dim=1)[1]
        return experts, gates.gather(1, experts), gates, settings.k <= 2

    def _sigmoid(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor, bool]:
        from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

        bias = self.expert_bias
        weights, chosen = topk_routing_with_score_function(
            logits, self.settings.k, score_function="sigmoid", expert_bias=None if bias is None else bias.to(logits)
        )
        # Megatron Core's map is [T, E]; exactly k entries of a row are set, so the columns come out in row order.
        experts = chosen.nonzero()[:, 1].view(-1, self.settings.k)
        gates = torch.sigmoid(logits)
        return experts, weights.gather(1, experts), gates / gates.sum(1, keepdim=True), False

    def _drop(self, experts: Tensor, gates: Tensor, priority: Tensor | None) -> Tensor:
        """Apply the capacity of a micro-batch as DeepSpeed does: which routes go depends on k.

        With one choice a token, those of the highest ``priority`` [T, E] stay, by default the first.
        """
        settings, num_tokens = self.settings, gates.shape[0]
        factor = settings.capacity_factor if self.training else settings.eval_capacity_factor
        # DeepSpeed multiplies in float32: the same rounding decides the same capacity.
        scaled = torch.tensor(factor * settings.k, dtype=torch.float32) * (num_tokens / settings.num_experts)
        capacity = max(math.ceil(float(scaled)), settings.min_capacity)
        mask = torch.zeros_like(gates, dtype=torch.int64)
        chosen = mask.scatter(1, experts.clamp(min=0), (experts >= 0).long()) if settings.k != 2 else mask
        if settings.k == 1:
            if num_tokens < settings.min_capacity:
                raise ValueError(
                    f"a micro-batch of {num_tokens} tokens is smaller than min_capacity={settings.min_capacity}"
                )
            order = chosen if priority is None else chosen * priority
            top = torch.topk(order, k=min(capacity, num_tokens), dim=0)[1]
            kept = mask.scatter(0, top, 1) * chosen
        elif settings.k == 2:
            first, second = (
                mask.scatter(1, experts[:, i : i + 1].clamp(min=0), (experts[:, i : i + 1] >= 0).long())
                for i in range(2)
            )
            position = torch.cumsum(first, 0) - 1
            kept = first * (position < capacity)
            position = torch.cumsum(second, 0) - 1 + first.sum(0, keepdim=True)
            kept = kept + second * (position < capacity)
        else:
            probabilities = gates.detach() * chosen
            top = torch.topk(probabilities, k=min(capacity, num_tokens), dim=0, sorted=False)[1]
            kept = mask.scatter(0, top, 1) * chosen
        keep = kept.gather(1, experts.clamp(min=0)).bool() & (experts >= 0)
        return experts.masked_fill(~keep, DROPPED)


def _counts(experts: Tensor, num_experts: int) -> Tensor:
    return torch.bincount(experts.reshape(-1) + 1, minlength=num_experts + 1)[1:]


def _gumbel(like: Tensor) -> Tensor:
    return _drawn(Gumbel(like.new_tensor(0.0), like.new_tensor(1.0)), like)


def _drawn(distribution: Distribution, like: Tensor) -> Tensor:
    # From DeepSpeed's distributions in its way, so that equal generators give equal routes.
    return distribution.rsample(like.shape)
