"""The experts' optimizer steps records exactly as the client's class steps ordinary parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from megatron_lazarus.moe.optimizer import ExpertOptimizer, optimizer_kind, record_state_names
from megatron_lazarus.moe.records import MASTER, PARAMETER, STEP, RecordBuffer, RecordLayout, TensorSpec

SPECS = (TensorSpec("weight", (4, 3), 0), TensorSpec("bias", (4,), 1), TensorSpec("last", (2, 2), 0))


def _twin(make: Any, dtype: torch.dtype) -> tuple[RecordBuffer, list[list[nn.Parameter]], torch.optim.Optimizer]:
    """Records of two experts, the same values as ordinary parameters, and an optimizer over those."""
    torch.manual_seed(1)
    values = [[torch.randn(spec.shape).to(dtype) for spec in SPECS] for _ in range(2)]
    parameters = [
        [nn.Parameter(value.clone().float() if dtype == torch.bfloat16 else value.clone()) for value in row]
        for row in values
    ]
    groups = [
        {"params": [p for row in parameters for p, spec in zip(row, SPECS, strict=True) if spec.option_group == group]}
        for group in (0, 1)
    ]
    groups[1]["weight_decay"] = 0.0
    optimizer = make(groups)
    buffer = RecordBuffer(RecordLayout(SPECS, dtype, record_state_names(optimizer)), [0, 1], torch.device("cpu"))
    for slot, row in enumerate(values):
        buffer.field(PARAMETER)[slot] = torch.cat([value.reshape(-1) for value in row])
    if buffer.layout.has_master:
        buffer.field(MASTER).copy_(buffer.field(PARAMETER))
    return buffer, parameters, optimizer


OPTIMIZERS = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1),
    "adam amsgrad": lambda groups: torch.optim.Adam(groups, lr=0.01, amsgrad=True, weight_decay=0.1),
    "adam fused": lambda groups: torch.optim.Adam(groups, lr=0.01, fused=True),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "plain sgd": lambda groups: torch.optim.SGD(groups, lr=0.1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_like_the_client_optimizer(name: str, dtype: torch.dtype) -> None:
    buffer, parameters, optimizer = _twin(OPTIMIZERS[name], dtype)
    experts = ExpertOptimizer(optimizer, [buffer])
    source = torch.Generator().manual_seed(2)
    for step in range(5):
        # A schedule and a user act on the client optimizer alone.
        optimizer.param_groups[0]["lr"] *= 0.5 + step / 4
        buffer.gradients.copy_(torch.randn(buffer.gradients.shape, generator=source))
        for slot, row in enumerate(parameters):
            start = 0
            for parameter in row:
                flat = buffer.gradients[slot, start : start + parameter.numel()]
                parameter.grad = flat.view(parameter.shape).to(parameter.dtype).clone()
                start += parameter.numel()
        experts.step()
        optimizer.step()
    update = buffer.field(MASTER if buffer.layout.has_master else PARAMETER)
    for slot, row in enumerate(parameters):
        expected = torch.cat([p.detach().reshape(-1) for p in row])
        assert torch.allclose(update[slot], expected, rtol=1e-6, atol=1e-7)
        assert torch.equal(buffer.field(PARAMETER)[slot], update[slot].to(dtype))
    assert buffer.field(STEP)[:, 0].tolist() == [5.0, 5.0]


def test_records_from_different_steps_keep_their_own_count() -> None:
    """An expert restored from an older checkpoint has its own bias correction."""
    buffer, _, optimizer = _twin(lambda groups: torch.optim.Adam(groups, lr=0.01), torch.float64)
    buffer.field(STEP)[1] = 40.0
    experts = ExpertOptimizer(optimizer, [buffer])
    buffer.gradients.fill_(0.1)
    start = buffer.field(PARAMETER).clone()
    experts.step()
    for slot, step in ((0, 1), (1, 41)):
        first, second = 0.01 / (1 - 0.9**step), 1e-5 / (1 - 0.999**step)
        moved = start[slot] - buffer.field(PARAMETER)[slot]
        assert torch.allclose(moved, torch.full_like(moved, 0.01 * first / (second**0.5 + 1e-8)), rtol=1e-9)
    assert buffer.field(STEP)[:, 0].tolist() == [1.0, 41.0]


class FusedAdam(torch.optim.Optimizer):
    """Keeps its count where NVIDIA's apex does: once per parameter group."""

    def __init__(
        self, params: Any, lr: float = 0.01, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                state, (first, second) = self.state[parameter], group["betas"]
                state["exp_avg"].mul_(first).add_(parameter.grad, alpha=1 - first)
                state["exp_avg_sq"].mul_(second).addcmul_(parameter.grad, parameter.grad, value=1 - second)
                scale = (1 - second ** group["step"]) ** 0.5 / (1 - first ** group["step"])
                with torch.no_grad():
                    parameter.sub_(group["lr"] * scale * state["exp_avg"] / (state["exp_avg_sq"].sqrt() + group["eps"]))


FusedAdam.__module__ = "apex.optimizers.fused_adam"


def test_class_that_counts_steps_per_group() -> None:
    assert optimizer_kind(FusedAdam).step_in == "group"
    results = {}
    for name, make in (
        ("fused", lambda groups: FusedAdam(groups)),
        ("torch", lambda groups: torch.optim.Adam(groups, lr=0.01)),
    ):
        buffer, _, optimizer = _twin(make, torch.float64)
        for group in optimizer.param_groups:
            group.pop("weight_decay", None)
            if name == "torch":
                group["weight_decay"] = 0.0
        buffer.field(STEP)[1] = 40.0
        experts = ExpertOptimizer(optimizer, [buffer])
        for _ in range(3):
            buffer.gradients.fill_(0.1)
            experts.step()
        results[name] = buffer.field(PARAMETER).clone()
        assert buffer.field(STEP)[:, 0].tolist() == [3.0, 43.0]
    assert torch.allclose(results["fused"], results["torch"], atol=1e-6)


def test_unknown_class_and_impossible_options_are_named() -> None:
    parameter = [nn.Parameter(torch.zeros(2))]
    with pytest.raises(ValueError, match=r"torch\.optim.*Adagrad is not supported.*torch\.optim\.AdamW"):
        record_state_names(torch.optim.Adagrad(parameter))
    with pytest.raises(ValueError, match=r"dampening=0\.5"):
        record_state_names(torch.optim.SGD(parameter, lr=0.1, momentum=0.9, dampening=0.5))
