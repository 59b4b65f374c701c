"""A script as users of DeepSpeed write them: nothing in it knows of lazarus. Run under both, it must do the same."""

from __future__ import annotations

import argparse
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn
from torch.nn import functional as F

HIDDEN, CLASSES = 16, 8


class Expert(nn.Module):
    """Several linears, a module of its own inside, buffers of several types, a gain of one element."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(HIDDEN, 24)
        self.twin = nn.Linear(HIDDEN, 24)
        self.inner = nn.Sequential(nn.LayerNorm(24), nn.Linear(24, HIDDEN, bias=False))
        self.register_buffer("scale", torch.linspace(0.8, 1.2, HIDDEN))
        self.register_buffer("order", torch.arange(HIDDEN).flip(0))
        self.register_buffer("shift", torch.full((1,), 0.1), persistent=False)
        self.gain = nn.Parameter(torch.tensor([0.9]))

    def forward(self, hidden: Tensor) -> tuple[Tensor, None]:
        # [groups, 1, rows, hidden] from the layer; as the residual MLP it gets what the model has.
        assert hidden.dim() in (3, 4)
        # Buffers may stay float32 where parameters do not.
        inner = self.inner(torch.tanh(self.up(hidden)) * self.twin(hidden))
        return (inner[..., self.order] * self.scale * self.gain + self.shift).to(hidden.dtype), None


class Classifier(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        # As scripts do: the layer is looked up where the model is constructed.
        from deepspeed.moe.layer import MoE

        self.k = options.get("k", 1)
        self.embed = nn.Linear(HIDDEN, HIDDEN)
        self.moe = nn.ModuleList(MoE(hidden_size=HIDDEN, expert=Expert(), **options) for _ in range(2))
        self.head = nn.Linear(HIDDEN, CLASSES)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        hidden, aux = self.embed(inputs), inputs.new_zeros(())
        for moe in self.moe:
            output, layer_aux, counts = moe(hidden)
            assert int(counts.sum()) == inputs[..., 0].numel() * self.k
            hidden, aux = hidden + output, aux + layer_aux
        return self.head(hidden), aux


def data(step: int, rank: int, micro: int, size: int = 16) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    inputs = torch.randn(4, size // 4, HIDDEN, generator=generator)
    return inputs, inputs[..., :CLASSES].argmax(-1)


def client_optimizer(model: nn.Module, kind: str) -> Any:
    """None: it comes from the JSON."""
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    if kind == "json":
        return None
    if kind == "callable":
        return lambda parameters: torch.optim.AdamW(parameters, lr=0.003, eps=1e-3)
    parameters: Any = {"params": list(model.parameters()), "name": "parameters"}
    if kind != "whole":
        parameters = split_params_into_different_moe_groups_for_optimizer(
            parameters, *([600] if kind == "chunks" else [])
        )
    else:
        parameters = [parameters]
    if kind == "sgd":
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    return torch.optim.AdamW(parameters, lr=0.003, eps=1e-3)


def build(rank: int, optimizer: str, config: dict[str, Any], **options: Any) -> Any:
    """The engine: constructed and initialised as every such script does it, each rank from a seed of its own."""
    torch.manual_seed(17 + rank)
    model = Classifier(**options)
    client = client_optimizer(model, optimizer)
    parameters = [p for p in model.parameters() if p.requires_grad]
    engine, *rest = deepspeed.initialize(
        args=argparse.Namespace(), model=model, optimizer=client, model_parameters=parameters, config=config
    )
    assert len(rest) == 3
    return engine


def outputs(engine: Any, rank: int) -> Tensor:
    """What the model says of data that it has not seen."""
    engine.eval()
    with torch.no_grad():
        logits = engine(data(999, rank, 0)[0].to(next(engine.module.parameters()).dtype))[0]
    engine.train()
    return logits.float().clone()


def types(engine: Any) -> set[tuple[str, str]]:
    """The type of every tensor of the state, whichever expert's."""
    return {(name.rpartition(".")[2], str(value.dtype)) for name, value in engine.module.state_dict().items()}


def train(engine: Any, rank: int, steps: int, first: int = 0) -> list[float]:
    """The script's own loop."""
    losses = []
    for step in range(first, first + steps):
        total = 0.0
        for micro in range(engine.gradient_accumulation_steps()):
            inputs, labels = data(step, rank, micro)
            logits, aux = engine(inputs.to(next(engine.module.parameters()).dtype))
            loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten()) + 0.01 * aux
            engine.backward(loss)
            engine.step()
            total += float(loss.detach())
        losses.append(total / engine.gradient_accumulation_steps())
    return losses
