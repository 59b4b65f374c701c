"""Side by side with stock ``deepspeed.moe.layer.MoE``: same weights, data and gate give the same training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.distributed.pool import Pools
from tests.distributed.tiny import HIDDEN, Expert, TinyMoE, batch, expert_values, lazarus_moe

WORLD, EXPERTS = 4, 8
AUX = 0.05
STEPS = 10


def _options(k: int, drop: bool, residual: bool) -> dict[str, Any]:
    return {
        "k": k,
        "capacity_factor": 1.0,
        "min_capacity": 2,
        "drop_tokens": drop,
        "use_rts": False,
        "top2_2nd_expert_sampling": False,
        "use_residual": residual,
    }


def _stock_model(rank: int, options: dict[str, Any]) -> nn.Module:
    from deepspeed.moe.layer import MoE

    local = EXPERTS // WORLD

    def make(layer: int) -> nn.Module:
        moe = MoE(HIDDEN, Expert(), EXPERTS, ep_size=WORLD, **options)
        for index, expert in enumerate(moe.deepspeed_moe.experts.deepspeed_experts):
            expert.load_state_dict(expert_values(layer, rank * local + index, torch.float32))
        return moe

    return TinyMoE(make, aux_coefficient=AUX)


def _train(rank: int, engine: Any, accumulation: int, steps: int) -> dict[str, Any]:
    """Run the script's own loop; keep logits and losses of the first step."""
    first: dict[str, Any] = {"logits": [], "loss": [], "aux": []}
    for step in range(steps):
        for micro in range(accumulation):
            loss, metrics = engine(**batch(step, micro * WORLD + rank))
            if step == 0:
                first["logits"].append(engine.module.last_logits.clone())
                first["loss"].append(loss.detach().clone())
                first["aux"].append(metrics["aux"].clone())
            engine.backward(loss)
            engine.step()
    return first


def _config(accumulation: int) -> dict[str, Any]:
    # Stock's norm depends on the layout of experts, and its default is to clip at 1.
    return {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": accumulation, "gradient_clipping": 0.0}


def _optimizer(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=0.003, eps=1e-3)


def stock(rank: int, world: int, options: dict[str, Any], accumulation: int, kind: str) -> dict[str, Any]:
    import deepspeed

    model = _stock_model(rank, options)
    gradients: dict[str, Tensor] = {}
    engine, *_ = deepspeed.initialize(model=model, optimizer=_optimizer(model, kind), config=_config(accumulation))
    take = engine._take_model_step

    def capture(*arguments: Any) -> None:
        if not gradients:
            gradients.update({n: p.grad.clone() for n, p in _global_names(rank, model)})
        take(*arguments)

    engine._take_model_step = capture
    first = _train(rank, engine, accumulation, STEPS)
    weights = {name: parameter.detach().clone() for name, parameter in _global_names(rank, model)}
    return {"first": first, "gradients": gradients, "weights": weights}


def _global_names(rank: int, model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Parameters by names that count experts over all ranks."""
    marker, local = ".deepspeed_experts.", EXPERTS // WORLD
    named = []
    for name, parameter in model.named_parameters():
        if marker in name:
            head, _, tail = name.partition(marker)
            index, _, rest = tail.partition(".")
            name = f"{head}{marker}{int(index) + rank * local}.{rest}"
        named.append((name, parameter))
    return named


def lazarus(rank: int, world: int, options: dict[str, Any], accumulation: int, kind: str) -> dict[str, Any]:
    import megatron_lazarus

    def make(layer: int) -> nn.Module:
        # Built as the stock layer is: the residual MLP must come from the same draws.
        return lazarus_moe(EXPERTS, residual_mlp=Expert(), **options)(layer)

    model = TinyMoE(make, aux_coefficient=AUX)
    config = {**_config(accumulation), "lazarus": {"experts": {"min_replicas": 2}}}
    engine, *_ = megatron_lazarus.initialize(model=model, optimizer=_optimizer(model, kind), config=config)
    gradients: dict[str, Tensor] = {}
    commit = engine.protocol._commit

    def capture(*arguments: Any) -> None:
        if not gradients:
            gradients.update({n: p.grad.clone() for n, p in model.named_parameters()})
            for layer in range(len(engine.experts.layers)):
                for expert, name, parameter in engine.experts.layers[layer].experts.local_parameters():
                    gradients[_expert_name(layer, expert, name)] = parameter.grad.clone()
        commit(*arguments)

    engine.protocol._commit = capture
    first = _train(rank, engine, accumulation, STEPS)
    return {"first": first, "gradients": gradients, "weights": dict(engine.module.state_dict())}


def _expert_name(layer: int, expert: int, name: str) -> str:
    return f"moe.{layer}.deepspeed_moe.experts.deepspeed_experts.{expert}.{name}"


def _close(ours: Tensor, theirs: Tensor, what: str) -> None:
    difference = float((ours - theirs).norm() / theirs.norm().clamp(min=1e-3))
    assert difference <= 1e-5, f"{what} differs by {difference:.3g}"


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("drop", [True, False])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_same_as_stock(workers: Pools, k: int, drop: bool, accumulation: int) -> None:
    _compare(workers, _options(k, drop, residual=False), accumulation, "sgd")


def test_same_as_stock_with_residual_expert(workers: Pools) -> None:
    _compare(workers, _options(1, True, residual=True), 1, "sgd")


def test_same_as_stock_with_adam(workers: Pools) -> None:
    _compare(workers, _options(2, False, residual=False), 1, "adam")


def _compare(workers: Pools, options: dict[str, Any], accumulation: int, kind: str) -> None:
    theirs = workers(WORLD)(stock, options, accumulation, kind, timeout=120)
    ours = workers(WORLD)(lazarus, options, accumulation, kind, timeout=120)
    for rank in range(WORLD):
        for what in ("logits", "loss", "aux"):
            for mine, stock_value in zip(ours[rank]["first"][what], theirs[rank]["first"][what], strict=True):
                assert torch.allclose(mine, stock_value, rtol=0, atol=1e-5), f"{what} of rank {rank}"
    for kept in ("gradients", "weights"):
        expected = {name: value for result in theirs for name, value in result[kept].items()}
        seen = set()
        for result in ours:
            for name, value in result[kept].items():
                seen.add(name)
                _close(value, expected[name], f"{kept} of {name}")
        assert seen == set(expected)
