"""Training of ``TinyMoE`` in one process, in float64, with no expert parallelism at all: the truth for the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from tests.distributed.tiny import HIDDEN, TinyMoE, make_expert


class ReferenceMoE(nn.Module):
    """Every expert applied to every token, and weighted: no routes, no dispatch, no dropped tokens."""

    def __init__(self, layer: int, num_experts: int, k: int) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, num_experts, bias=False)
        self.experts = nn.ModuleList(make_expert(layer)(index) for index in range(num_experts))
        self.k = k

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, None]:
        flat = hidden.reshape(-1, HIDDEN)
        gates = torch.softmax(self.gate(flat), dim=1)
        chosen = torch.zeros_like(gates).scatter(1, gates.topk(self.k, dim=1).indices, 1.0)
        weights = gates * chosen
        if self.k > 1:
            weights = weights / weights.sum(1, keepdim=True)
        outputs = torch.stack([expert(flat) for expert in self.experts], dim=1)
        counted = chosen if self.k > 2 else torch.zeros_like(gates).scatter(1, gates.argmax(1, keepdim=True), 1.0)
        share = counted.mean(0) / (self.k if self.k > 2 else 1)
        aux = (gates.mean(0) * share).sum() * len(self.experts)
        return (weights.unsqueeze(-1) * outputs).sum(1).view(hidden.shape), aux, None


def train(
    num_experts: int,
    k: int,
    micro_batches: int,
    steps: int,
    clip: float,
    data: Callable[[int, int], dict[str, Tensor]],
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    make_scheduler: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler],
    aux_coefficient: float,
) -> list[tuple[float, float]]:
    """(mean loss, gradient norm before clipping) of each step."""
    batches = ([data(step, micro) for micro in range(micro_batches)] for step in range(steps))
    history = train_on(num_experts, k, batches, clip, make_optimizer, make_scheduler, aux_coefficient)
    return [(loss, norm) for loss, norm, _ in history]


def train_on(
    num_experts: int,
    k: int,
    steps: Iterable[Sequence[dict[str, Tensor]]],
    clip: float,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    make_scheduler: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler],
    aux_coefficient: float,
    evaluate_on: Sequence[dict[str, Tensor]] = (),
) -> list[tuple[float, float, list[float]]]:
    """(mean loss, gradient norm before clipping, losses of ``evaluate_on`` after it) of each step.

    A step is the mean over its micro-batches, however many it has.
    """
    torch.set_default_dtype(torch.float64)
    try:
        model = TinyMoE(lambda layer: ReferenceMoE(layer, num_experts, k), aux_coefficient=aux_coefficient)
        optimizer = make_optimizer(model)
        scheduler = make_scheduler(optimizer)
        history = []
        for micro_batches in steps:
            total = 0.0
            for values in micro_batches:
                loss, _ = model(**values)
                (loss / len(micro_batches)).backward()
                total += float(loss.detach()) / len(micro_batches)
            norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            with torch.no_grad():
                seen = [float(model(**values)[0]) for values in evaluate_on]
            history.append((total, float(norm), seen))
        return history
    finally:
        torch.set_default_dtype(torch.float32)
