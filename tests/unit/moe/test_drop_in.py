"""The layer that stands in the place of ``deepspeed.moe.layer.MoE``, beside the original."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from deepspeed.moe.layer import MoE as Stock
from deepspeed.moe.utils import is_moe_param, split_params_into_different_moe_groups_for_optimizer
from torch import nn

from megatron_lazarus.moe.drop_in import MoE


def _pair(**options: Any) -> tuple[MoE, Stock]:
    layers = []
    for cls in (MoE, Stock):
        torch.manual_seed(5)
        layers.append(cls(8, nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8)), **options))
    return layers[0], layers[1]


def test_the_constructor_is_the_originals() -> None:
    mine, theirs = (inspect.signature(cls.__init__).parameters for cls in (MoE, Stock))
    assert [(name, p.default, p.kind) for name, p in mine.items()] == [
        (name, p.default, p.kind) for name, p in theirs.items()
    ]
    assert MoE.__name__ == Stock.__name__


@pytest.mark.parametrize("ep_size", [1, 2, 4])
@pytest.mark.parametrize("use_residual", [False, True])
def test_the_same_names_values_marks_and_draws(ep_size: int, use_residual: bool) -> None:
    mine, theirs = _pair(num_experts=4, ep_size=ep_size, k=2, use_residual=use_residual)
    expected = theirs.state_dict()
    assert list(mine.state_dict()) == list(expected)
    for name, value in mine.state_dict().items():
        assert torch.equal(value, expected[name]), name
    marks = [
        {name: (is_moe_param(p), getattr(p, "group_name", None)) for name, p in layer.named_parameters()}
        for layer in (mine, theirs)
    ]
    assert marks[0] == marks[1]
    for name in ("num_experts", "num_local_experts", "ep_size", "expert_group_name", "use_residual"):
        assert getattr(mine, name) == getattr(theirs, name)
    assert mine.enable_expert_tensor_parallelism is theirs.enable_expert_tensor_parallelism


def test_constructing_draws_as_often() -> None:
    draws = []
    for cls in (MoE, Stock):
        torch.manual_seed(5)
        cls(8, nn.Linear(8, 8), 4, use_residual=True)
        draws.append(torch.rand(3).tolist())
    assert draws[0] == draws[1]


def test_groups_for_the_optimizer_as_with_the_original() -> None:
    sizes = []
    for layer in _pair(num_experts=4, ep_size=2):
        groups = split_params_into_different_moe_groups_for_optimizer({"params": list(layer.parameters()), "name": "p"})
        sizes.append([(g["name"], g.get("moe"), [tuple(p.shape) for p in g["params"]]) for g in groups])
    assert sizes[0] == sizes[1]
    assert [name for name, *_ in sizes[0]] == ["p", "ep_size_2"]


class Named(MoE):
    """As scripts subclass it."""

    def __init__(self, size: int) -> None:
        super().__init__(size, nn.Linear(size, size), num_experts=2, use_rts=False, capacity_factor=4.0)
        self.calls = 0

    def forward(self, *arguments: Any, **options: Any) -> Any:
        self.calls += 1
        return super().forward(*arguments, **options)


def test_a_subclass_computes_and_returns_three_things() -> None:
    torch.manual_seed(1)
    layer = Named(8)
    tokens = torch.randn(3, 4, 8)
    output, aux, counts = layer(tokens, torch.tensor([1.0] * 9 + [0.0] * 3))
    assert isinstance(layer, MoE)
    assert layer.calls == 1
    assert output.shape == tokens.shape
    assert int(counts.sum()) == 9
    assert torch.equal(counts, layer.exp_counts)
    assert torch.equal(counts, layer.deepspeed_moe.exp_counts)
    assert aux is layer.l_aux is layer.deepspeed_moe.l_aux
    aux.backward()
    assert layer.deepspeed_moe.gate.wg.weight.grad is not None
    # Every expert at once, weighted by hand.
    probabilities = torch.softmax(layer.deepspeed_moe.gate.wg(tokens), -1)
    best, index = probabilities.max(-1)
    both = torch.stack([expert(tokens) for expert in layer.deepspeed_moe.experts.deepspeed_experts], -2)
    by_hand = both.gather(-2, index[..., None, None].expand(*index.shape, 1, 8)).squeeze(-2) * best[..., None]
    by_hand[2, 1:] = 0.0
    assert torch.allclose(output, by_hand, atol=1e-6)


def test_before_initialize_a_part_of_the_experts_cannot_compute() -> None:
    layer = MoE(8, nn.Linear(8, 8), 4, ep_size=2)
    with pytest.raises(RuntimeError, match=r"2 of 4 experts.*before deepspeed\.initialize"):
        layer(torch.randn(8, 8))


def test_groups_of_ranks_are_not_made() -> None:
    """DeepSpeed's engine calls this in a world of any size."""
    MoE(8, nn.Linear(8, 8), 4, ep_size=4).set_deepspeed_parallelism(True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_tutel": True}, "use_tutel is True; only False is legal"),
        ({"enable_expert_tensor_parallelism": True}, "enable_expert_tensor_parallelism is True; only False is legal"),
        ({"ep_size": 3}, "ep_size is 3; it must divide num_experts = 4"),
        ({"ep_size": 0}, "ep_size is 0; it must divide"),
        ({"k": 5}, r"k \(top-k\) is 5; with num_experts=4 it must be 1"),
        ({"noisy_gate_policy": "Loud"}, "noisy_gate_policy is 'Loud'; legal: None, 'Jitter', 'RSample'"),
        ({"expert": nn.Linear}, "expert is a type; it must be a torch.nn.Module"),
        ({"expert": nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))}, r"'1' has dropout p=0\.5"),
    ],
)
def test_what_cannot_be_honoured_is_named(options: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"hidden_size": 8, "expert": nn.Linear(8, 8), "num_experts": 4, **options}
    with pytest.raises(ValueError, match=message):
        MoE(**arguments)
