"""The sigmoid router and its balancing, against plain formulas; the softmax router is tested against DeepSpeed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megatron_lazarus.moe.gating import DROPPED, Gate, GateSettings
from megatron_lazarus.moe.layer import MoELayer


def _gate(**options: object) -> tuple[Gate, torch.Tensor]:
    torch.manual_seed(3)
    settings = GateSettings(5, k=2, drop_tokens=False, **options)  # type: ignore[arg-type]
    return Gate(8, settings).double(), torch.randn(40, 8, dtype=torch.float64)


def test_sigmoid_choice_follows_the_bias_and_weights_do_not() -> None:
    gate, tokens = _gate(score_function="sigmoid", expert_bias_update_rate=0.1)
    assert gate.expert_bias is not None
    gate.expert_bias[:] = torch.tensor([0.0, 0.3, -0.2, 0.0, 0.1])
    routes = gate(tokens)
    scores = torch.sigmoid(tokens @ gate.wg.weight.t())
    for token in range(40):
        chosen = (scores[token] + gate.expert_bias).topk(2).indices
        assert set(routes.experts[token].tolist()) == set(chosen.tolist())
        plain = scores[token, routes.experts[token]]
        assert torch.allclose(routes.weights[token], plain / plain.sum(), rtol=1e-6)
    assert routes.wanted.sum() == 80


def test_bias_moves_against_the_load() -> None:
    gate, _ = _gate(score_function="sigmoid", expert_bias_update_rate=0.1)
    gate.update_expert_bias(torch.tensor([10, 0, 4, 5, 6]))
    assert gate.expert_bias is not None
    assert torch.allclose(gate.expert_bias, torch.tensor([-0.1, 0.1, 0.1, 0.0, -0.1]).double())


def test_unused_tokens_reach_no_expert() -> None:
    gate, tokens = _gate()
    used = torch.arange(40) % 3 == 0
    routes = gate(tokens, used)
    assert (routes.experts[~used] == DROPPED).all()
    assert (routes.experts[used] >= 0).all()
    assert (routes.weights[~used] == 0).all()
    assert routes.wanted.sum() == 2 * int(used.sum())


def test_z_loss_trains_the_router_with_its_coefficient() -> None:
    torch.manual_seed(0)
    layer = MoELayer(8, nn.Linear(8, 8), 3, drop_tokens=False, z_loss_coefficient=0.5).double()
    tokens = torch.randn(20, 8, dtype=torch.float64)
    # The output gets no gradient of its own, so all of it is the attached loss's.
    (layer(tokens)[0] * 0.0).sum().backward()
    weight = layer.gate.wg.weight
    expected = torch.autograd.grad(0.5 * torch.logsumexp(tokens @ weight.t(), 1).square().mean(), weight)[0]
    assert weight.grad is not None
    assert torch.allclose(weight.grad, expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"router": "tanh"}, "router is 'tanh'"),
        ({"router": "sigmoid"}, "router 'sigmoid' routes without dropping"),
        ({"expert_bias_update_rate": 0.1}, "needs router='sigmoid'"),
        ({"noisy_gate_policy": "Loud"}, "noisy_gate_policy is 'Loud'"),
        ({"enable_expert_tensor_parallelism": True}, "enable_expert_tensor_parallelism is True"),
        ({"max_tokens_per_expert_chunk": 0}, "max_tokens_per_expert_chunk is 0"),
    ],
)
def test_arguments_that_do_not_fit(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MoELayer(8, nn.Linear(8, 8), 4, **options)  # type: ignore[arg-type]
