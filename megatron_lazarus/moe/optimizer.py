"""Steps the expert records with the same kind of optimizer, and the same options, as the dense parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from megatron_lazarus.moe.records import MASTER, PARAMETER, STEP, RecordBuffer

_ADAM_STATE = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class OptimizerKind:
    """How one optimizer class keeps its state: which tensors, and where it counts steps.

    ``step_in``: "tensor" (torch: a tensor in the parameter's state), "state" (a number in the parameter's state),
    "group" (a number in the parameter group) or "none".
    """

    class_name: str
    module_prefix: str
    state_names: Callable[[dict[str, Any]], tuple[str, ...]]
    step_in: str


def _torch_adam_state(options: dict[str, Any]) -> tuple[str, ...]:
    return (*_ADAM_STATE, "max_exp_avg_sq") if options.get("amsgrad") else _ADAM_STATE


def _sgd_state(options: dict[str, Any]) -> tuple[str, ...]:
    if options.get("dampening"):
        raise ValueError(
            f"optimizer SGD has dampening={options['dampening']}; torch leaves it out of the first step only, which a "
            "record cannot tell: use dampening=0"
        )
    return ("momentum_buffer",) if options.get("momentum") else ()


KINDS = (
    OptimizerKind("Adam", "torch.optim", _torch_adam_state, "tensor"),
    OptimizerKind("AdamW", "torch.optim", _torch_adam_state, "tensor"),
    OptimizerKind("SGD", "torch.optim", _sgd_state, "none"),
    OptimizerKind("FusedAdam", "deepspeed.ops.adam", lambda _: _ADAM_STATE, "state"),
    OptimizerKind("DeepSpeedCPUAdam", "deepspeed.ops.adam", lambda _: _ADAM_STATE, "state"),
    OptimizerKind("FusedAdam", "apex.optimizers", lambda _: _ADAM_STATE, "group"),
)


def optimizer_kind(optimizer: torch.optim.Optimizer | type) -> OptimizerKind:
    """The kind of ``optimizer``. Raises ValueError, naming the type, if expert records cannot follow it."""
    cls = optimizer if isinstance(optimizer, type) else type(optimizer)
    for kind in KINDS:
        if cls.__name__ == kind.class_name and cls.__module__.startswith(kind.module_prefix):
            return kind
    known = sorted({f"{kind.module_prefix}.{kind.class_name}" for kind in KINDS})
    raise ValueError(f"optimizer {cls.__module__}.{cls.__name__} is not supported for experts; known: {known}")


def record_state_names(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """State tensors of ``optimizer`` per parameter. Raises ValueError if its groups disagree or it is unknown."""
    names = {optimizer_kind(optimizer).state_names(group) for group in optimizer.param_groups}
    if len(names) != 1:
        raise ValueError(f"the optimizer's parameter groups keep different state {sorted(names)}; use the same options")
    return names.pop()


@dataclass(frozen=True)
class _Segment:
    """A run of one record that one option group owns: what is updated, its state and its gradient, all views."""

    parameter: nn.Parameter
    state: dict[str, torch.Tensor]
    gradient: torch.Tensor
    option_group: int
    buffer: RecordBuffer
    slot: int


def _segments(buffer: RecordBuffer) -> list[_Segment]:
    update = buffer.field(MASTER if buffer.layout.has_master else PARAMETER)
    states = {name: buffer.field(name) for name in buffer.layout.state_names}
    return [
        _Segment(
            parameter=nn.Parameter(update[slot, start:end]),
            state={name: flat[slot, start:end] for name, flat in states.items()},
            gradient=buffer.gradients[slot, start:end],
            option_group=option_group,
            buffer=buffer,
            slot=slot,
        )
        for slot in range(len(buffer.experts))
        for option_group, start, end in buffer.layout.segments()
    ]


class ExpertOptimizer:
    """A twin of ``base`` over the records of all layers.

    Option groups are those of ``base`` by index; learning rate and all other options are read from them at every
    step, so schedulers and users act on ``base`` alone.
    """

    def __init__(self, base: torch.optim.Optimizer, buffers: Sequence[RecordBuffer]) -> None:
        self._base, self._buffers = base, buffers
        self._kind = optimizer_kind(base)
        self._segments = [segment for buffer in buffers for segment in _segments(buffer)]
        self._inner: torch.optim.Optimizer | None = None
        if self._segments:
            accepted = type(base).__init__.__code__.co_varnames
            options = {key: value for key, value in base.defaults.items() if key in accepted}
            self._inner = type(base)(self._groups(), **options)
            for attribute in ("adam_w_mode", "adamw_mode"):
                if hasattr(base, attribute):
                    setattr(self._inner, attribute, getattr(base, attribute))
        self.load_steps()

    def _groups(self) -> list[dict[str, Any]]:
        """Inner parameter groups; ``option_group`` in each says whose options it follows."""
        if self._kind.step_in in ("tensor", "none"):
            shared: dict[int, dict[str, Any]] = {}
            for segment in self._segments:
                group = shared.setdefault(segment.option_group, {"params": [], "option_group": segment.option_group})
                group["params"].append(segment.parameter)
            return list(shared.values())
        # These classes count steps once per group; experts restored from different steps must not share a count.
        return [{"params": [segment.parameter], "option_group": segment.option_group} for segment in self._segments]

    def load_steps(self) -> None:
        """Take state and step counts from the records: after construction, migration or a load."""
        if self._inner is None:
            return
        steps = {id(buffer): buffer.field(STEP)[:, 0].tolist() for buffer in self._buffers}
        group_of = {id(p): group for group in self._inner.param_groups for p in group["params"]}
        for segment in self._segments:
            step = steps[id(segment.buffer)][segment.slot]
            entry: dict[str, Any] = dict(segment.state)
            if self._kind.step_in == "tensor":
                entry["step"] = torch.tensor(step, dtype=torch.float32, device=self._step_device(segment.parameter))
            elif self._kind.step_in == "state":
                entry["step"] = int(step)
            elif self._kind.step_in == "group":
                group_of[id(segment.parameter)]["step"] = int(step)
            self._inner.state[segment.parameter] = entry

    def _step_device(self, parameter: nn.Parameter) -> torch.device:
        options = self._base.param_groups[0]
        on_device = options.get("fused") or options.get("capturable")
        return parameter.device if on_device else torch.device("cpu")

    @torch.no_grad()
    def step(self) -> None:
        """One step on ``buffer.gradients``; parameters, masters, state and step counts in the records advance."""
        if self._inner is None:
            return
        for group in self._inner.param_groups:
            for key, value in self._base.param_groups[group["option_group"]].items():
                if key not in ("params", "step"):
                    group[key] = value
        for segment in self._segments:
            segment.parameter.grad = segment.gradient.to(segment.parameter.dtype)
        self._inner.step()
        for segment in self._segments:
            segment.parameter.grad = None
        for buffer in self._buffers:
            buffer.field(STEP).add_(1.0)
            if buffer.layout.has_master:
                buffer.field(PARAMETER).copy_(buffer.field(MASTER))
