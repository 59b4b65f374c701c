"""An optimizer's state dict by parameter names, which DeepSpeed's checkpoints do not hold.

They count an optimizer's parameters group by group. Which parameter a number means follows from how the groups were
made from the model's parameters in their order: by a *rule* that gives each parameter the index of its group, and where
the groups were split for MoE, by DeepSpeed's own function.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatron_lazarus.checkpoint.files import CheckpointError
from megatron_lazarus.checkpoint.writer import MASTER

STEP = "step"


@dataclass(frozen=True)
class Parameter:
    """What an optimizer steps; ``home`` is (MoE layer, expert on this rank, tensor) of an expert's parameter."""

    name: str
    shape: tuple[int, ...]
    home: tuple[int, int, str] | None = None


PLACEHOLDER = Parameter("", (0,))
"""What lazarus leaves in a group whose parameters are all experts', so that the group stays."""

Rule = Callable[[Parameter], int]
"""The index of a parameter's group, before groups are split for MoE; -1 if no group has it."""

USUAL_RULES: tuple[Rule, ...] = (
    lambda parameter: 0,
    lambda parameter: 0 if len(parameter.shape) > 1 else 1,
    lambda parameter: 1 if len(parameter.shape) > 1 else 0,
)
"""All in one group; or biases and norms, which have one dimension, apart for the sake of weight decay."""


def rule_of_patterns(patterns: Sequence[str]) -> Rule:
    """Group i holds the parameters in whose names regular expression i is found and no earlier one is."""
    compiled = [re.compile(pattern) for pattern in patterns]

    def rule(parameter: Parameter) -> int:
        return next((index for index, one in enumerate(compiled) if one.search(parameter.name)), -1)

    return rule


@dataclass(frozen=True)
class Group:
    """Parameters of one optimizer group in order; ``base`` is the group it was split from, ``moe`` if for experts."""

    parameters: tuple[Parameter, ...]
    base: int
    moe: bool


def arrange(parameters: Sequence[Parameter], rule: Rule, count: int, split: bool) -> list[Group] | None:
    """Groups by ``rule``, of which there are ``count``; ``split``: then as DeepSpeed splits them for MoE.

    None if the rule gives other groups than these.
    """
    classes = [rule(parameter) for parameter in parameters]
    if max(classes, default=-1) >= count:
        return None
    members = [tuple(p for p, c in zip(parameters, classes, strict=True) if c == i) for i in range(count)]
    if not split:
        return [Group(member or (PLACEHOLDER,), base, False) for base, member in enumerate(members)]
    return split_for_moe([Group(member, base, False) for base, member in enumerate(members)])


def split_for_moe(groups: Sequence[Group]) -> list[Group]:
    """The groups that DeepSpeed makes of these: experts in groups of their own, behind the others."""
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    stand_ins: dict[int, Parameter] = {}
    keep: list[nn.Parameter] = []
    bases: list[dict[str, Any]] = []
    for index, group in enumerate(groups):
        bases.append({"params": [], "name": str(index), "base": group.base})
        for parameter in group.parameters:
            stand_in = nn.Parameter(torch.empty(parameter.shape, device="meta"))
            keep.append(stand_in)
            stand_ins[id(stand_in)] = parameter
            if parameter.home is not None:
                stand_in.allreduce, stand_in.group_name = False, "experts"  # type: ignore[attr-defined]
            bases[-1]["params"].append(stand_in)
    return [
        Group(tuple(stand_ins[id(p)] for p in group["params"]), group["base"], bool(group.get("moe")))
        for group in split_params_into_different_moe_groups_for_optimizer(bases)
    ]


@dataclass
class NamedOptimizer:
    """An optimizer's state: ``entries[name]`` holds a parameter's state and, beside it, ``master`` where there is one.

    ``groups`` and ``options`` (learning rate and the like) go together. ``wrapper`` holds what DeepSpeed's optimizer
    for bf16 keeps around the client optimizer's state.
    """

    groups: list[Group]
    options: list[dict[str, Any]]
    entries: dict[str, dict[str, Any]]
    wrapper: dict[str, Any] | None

    @classmethod
    def read(cls, state: Mapping[str, Any], groups: Sequence[Group], what: str) -> NamedOptimizer:
        """Give names to ``state``. Raises CheckpointError, naming ``what``, if ``groups`` do not fit it."""
        found = cls._read(state, groups, what)
        if found is None:
            have = [len(group["params"]) for group in _unwrap(state, what)[0]["param_groups"]]
            want = [len(group.parameters) for group in groups]
            raise CheckpointError(
                f"{what}: its groups hold {have} parameters, the script's {want}, or they have other shapes"
            )
        return found

    @classmethod
    def guess(
        cls, state: Mapping[str, Any], parameters: Sequence[Parameter], rules: Sequence[Rule], what: str
    ) -> tuple[NamedOptimizer, Rule]:
        """Give names to ``state`` by the first of ``rules`` that fits its groups and shapes; also returns the rule.

        Raises CheckpointError, naming ``what``, if none fits.
        """
        options = _unwrap(state, what)[0]["param_groups"]
        split = any(option.get("moe") for option in options)
        count = sum(not option.get("moe") for option in options)
        for rule in rules:
            groups = arrange(parameters, rule, count, split)
            found = None if groups is None else cls._read(state, groups, what)
            if found is not None:
                return found, rule
        sizes = ", ".join(str(len(option["params"])) for option in options)
        raise CheckpointError(
            f"{what}: which parameters its {len(options)} groups of {sizes} hold cannot be told; give one "
            "pattern of parameter names for each group (--parameter-groups)"
        )

    @classmethod
    def _read(cls, state: Mapping[str, Any], groups: Sequence[Group], what: str) -> NamedOptimizer | None:
        inner, masters, wrapper = _unwrap(state, what)
        options = [{k: v for k, v in group.items() if k != "params"} for group in inner["param_groups"]]
        numbers = [list(group["params"]) for group in inner["param_groups"]]
        shapes = [
            [_shape(inner["state"].get(number), None if masters is None else masters[index][position])
             for position, number in enumerate(group)]
            for index, group in enumerate(numbers)
        ]  # fmt: skip
        if not _fits(groups, shapes):
            return None
        entries: dict[str, dict[str, Any]] = {}
        for index, group in enumerate(groups):
            for position, parameter in enumerate(group.parameters):
                entry = dict(inner["state"].get(numbers[index][position], {}))
                if STEP in options[index]:
                    entry[STEP] = options[index][STEP]
                if masters is not None:
                    entry[MASTER] = masters[index][position].detach()
                entries[parameter.name] = entry
        return cls(list(groups), options, entries, wrapper)

    def state_dict(self) -> dict[str, Any]:
        """The state dict with numbers instead of names."""
        state: dict[int, Any] = {}
        groups, masters, number = [], [], 0
        for group, options in zip(self.groups, self.options, strict=True):
            numbers, group_masters = [], []
            for parameter in group.parameters:
                entry = self.entries.get(parameter.name, {})
                kept = {k: v for k, v in entry.items() if k != MASTER and not (k == STEP and STEP in options)}
                if kept:
                    state[number] = kept
                if MASTER in entry or parameter == PLACEHOLDER:
                    group_masters.append(entry.get(MASTER, torch.empty(0)))
                numbers.append(number)
                number += 1
            groups.append({**options, "params": numbers})
            masters.append(group_masters)
        inner = {"state": state, "param_groups": groups}
        if self.wrapper is None:
            return inner
        return {**self.wrapper, "optimizer_state_dict": inner, "fp32_groups": masters}


def step_count(entry: Mapping[str, Any], default: int) -> int:
    """Steps that the optimizer counted for a parameter; ``default`` where it does not count, as SGD."""
    value = entry.get(STEP, default)
    return int(value.item() if isinstance(value, Tensor) else value)


def _unwrap(state: Mapping[str, Any], what: str) -> tuple[Mapping[str, Any], Any, dict[str, Any] | None]:
    if "optimizer_state_dict" not in state:
        if "param_groups" not in state:
            raise CheckpointError(f"{what}: this is no state of an optimizer of ZeRO stage 0; its keys: {list(state)}")
        return state, None, None
    if "fp32_groups" not in state:
        raise CheckpointError(
            f"{what}: its master weights are flat ({', '.join(map(str, state))}), as a fused optimizer keeps them in "
            "bf16; only torch's optimizers can be converted there"
        )
    wrapper = {k: v for k, v in state.items() if k not in ("optimizer_state_dict", "fp32_groups")}
    return state["optimizer_state_dict"], state["fp32_groups"], wrapper


def _shape(entry: Mapping[str, Any] | None, master: Tensor | None) -> tuple[int, ...] | None:
    if master is not None:
        return tuple(master.shape)
    for name, value in (entry or {}).items():
        if isinstance(value, Tensor) and name != STEP:
            return tuple(value.shape)
    return None


def _fits(groups: Sequence[Group], shapes: Sequence[Sequence[tuple[int, ...] | None]]) -> bool:
    return [len(group.parameters) for group in groups] == [len(group) for group in shapes] and all(
        shape in (None, parameter.shape)
        for group, found in zip(groups, shapes, strict=True)
        for parameter, shape in zip(group.parameters, found, strict=True)
    )
