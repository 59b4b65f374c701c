"""How a script divides its parameters among the groups of its optimizer, under ``deepspeed.moe`` and here.

An optimizer's state counts parameters group by group. With this beside it, the state of either side becomes that of
the other, and a run may go on whose groups were made in another way.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_lazarus.checkpoint.files import CheckpointError
from megatron_lazarus.checkpoint.optimizer_state import PLACEHOLDER, Group, NamedOptimizer, Parameter
from megatron_lazarus.checkpoint.stock_layout import regrouped_schedule

KEY = "lazarus_parameter_groups"
"""Where the dense state of a checkpoint holds them."""


@dataclass(frozen=True)
class ParameterGroups:
    """``groups``: those of ``deepspeed.moe``, with a rank's experts; ``base`` is the index of the group here.

    ``here``: how many groups there are here, where groups hold dense parameters only; ``placeholders``: those that
    would hold nothing have an empty parameter. ``local``: experts that a rank has in ``groups``, by layer.
    """

    groups: tuple[Group, ...]
    here: int
    local: tuple[int, ...]
    placeholders: bool = True

    def dense(self) -> list[Group]:
        """The groups here."""
        held: list[list[Parameter]] = [[] for _ in range(self.here)]
        for group in self.groups:
            held[group.base] += [parameter for parameter in group.parameters if parameter.home is None]
        nothing = (PLACEHOLDER,) if self.placeholders else ()
        return [Group(tuple(parameters) or nothing, base, False) for base, parameters in enumerate(held)]

    def for_local(self, local: Sequence[int]) -> list[Group]:
        """The groups of ``deepspeed.moe`` where a rank has so many experts of each layer.

        Raises CheckpointError if that cannot be told, because experts are not in order in their groups.
        """
        if tuple(local) == self.local:
            return list(self.groups)
        return [replace(group, parameters=tuple(self._resized(group.parameters, local))) for group in self.groups]

    def _resized(self, parameters: Sequence[Parameter], local: Sequence[int]) -> list[Parameter]:
        resized: list[Parameter] = []
        for layer, members in itertools.groupby(parameters, lambda p: -1 if p.home is None else p.home[0]):
            run = list(members)
            if layer < 0:
                resized += run
                continue
            first = [parameter for parameter in run if parameter.home is not None and parameter.home[1] == 0]
            if run != [_of_expert(p, index) for index in range(self.local[layer]) for p in first]:
                raise CheckpointError(
                    f"experts of MoE layer {layer} are spread over optimizer groups by their number: that cannot be "
                    f"done for {local[layer]} experts a rank instead of {self.local[layer]}; use the same ep_size"
                )
            resized += [_of_expert(p, index) for index in range(local[layer]) for p in first]
        return resized

    def to_json(self) -> dict[str, Any]:
        groups = [
            {"base": group.base, "moe": group.moe, "parameters": [[p.name, p.shape, p.home] for p in group.parameters]}
            for group in self.groups
        ]
        return {"groups": groups, "here": self.here, "local": self.local, "placeholders": self.placeholders}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> ParameterGroups:
        def parameter(name: str, shape: Sequence[int], home: Sequence[Any] | None) -> Parameter:
            return Parameter(name, tuple(shape), None if home is None else (home[0], home[1], home[2]))

        groups = tuple(
            Group(tuple(parameter(*entry) for entry in group["parameters"]), group["base"], group["moe"])
            for group in value["groups"]
        )
        return cls(groups, value["here"], tuple(value["local"]), value["placeholders"])


def regrouped(
    optimizer: NamedOptimizer, schedule: Any, home: Mapping[Any, int], target: ParameterGroups
) -> tuple[Any, Any]:
    """(state of the dense part's optimizer, state of the scheduler) for the groups of ``target``.

    ``home`` says of ``key(parameter)`` by which of ``optimizer.options`` it was stepped. Raises CheckpointError for a
    group none of whose parameters was.
    """
    bases = []
    for base in range(target.here):
        members = [p for group in target.groups if group.base == base for p in group.parameters]
        found = next((home[key(p)] for p in members if key(p) in home), None)
        if found is None:
            names = ", ".join(p.name for p in members[:3])
            raise CheckpointError(
                f"no parameter of optimizer group {base} ({names} …) is in the checkpoint's optimizer"
            )
        bases.append(found)
    options = [optimizer.options[base] for base in bases]
    state = replace(optimizer, groups=target.dense(), options=options).state_dict()
    return state, regrouped_schedule(schedule, bases)


def key(parameter: Parameter) -> Any:
    """What a parameter is, whichever expert's: all experts of a layer have the same options."""
    return parameter.name if parameter.home is None else (parameter.home[0], parameter.home[2])


def adapted(state: dict[str, Any], target: ParameterGroups) -> dict[str, Any]:
    """The dense state of a checkpoint of lazarus, its optimizer's for the groups of ``target``; without ``KEY``."""
    state = dict(state)
    saved = state.pop(KEY, None)
    if saved is None or state.get("optimizer") is None:
        return state
    groups = ParameterGroups.from_json(saved)
    if groups.dense() == target.dense():
        return state
    optimizer = NamedOptimizer.read(state["optimizer"], groups.dense(), "the optimizer of the dense part")
    home = {key(p): group.base for group in groups.groups for p in group.parameters}
    state["optimizer"], state["lr_scheduler"] = regrouped(optimizer, state.get("lr_scheduler"), home, target)
    return state


def _of_expert(parameter: Parameter, index: int) -> Parameter:
    assert parameter.home is not None
    layer, local, tensor = parameter.home
    prefix = parameter.name.removesuffix(f"{local}.{tensor}")
    return replace(parameter, name=f"{prefix}{index}.{tensor}", home=(layer, index, tensor))
