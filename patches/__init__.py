"""What is overridden in DeepSpeed and Megatron Core: one file per upstream module, each entry data with reasons."""

from dataclasses import replace
from functools import partial
from typing import Any

from megatron_lazarus.patches.deepspeed_accelerator import CPU_FLOAT64
from megatron_lazarus.patches.deepspeed_comm import INIT_DISTRIBUTED, INIT_DISTRIBUTED_IN_PACKAGE
from megatron_lazarus.patches.deepspeed_init import INIT_DISTRIBUTED_AT_TOP, INITIALIZE
from megatron_lazarus.patches.deepspeed_moe_layer import MOE
from megatron_lazarus.patches.deepspeed_moe_utils import MOE_IN_UTILS
from megatron_lazarus.patches.registry import (
    Patch,
    PatchError,
    applied,
    apply_all,
    state_in,
    state_of,
    undo_all,
    unpatched,
)

ALWAYS = (CPU_FLOAT64,)
"""What ``megatron_lazarus.initialize`` needs."""

_OF_SECTION = (INIT_DISTRIBUTED, INIT_DISTRIBUTED_IN_PACKAGE, INIT_DISTRIBUTED_AT_TOP, INITIALIZE)

ALL = (*ALWAYS, MOE, MOE_IN_UTILS, *_OF_SECTION)
"""Also what makes a script of DeepSpeed's one of lazarus."""


def drop_in(section: Any, engines: list[Any] | None = None) -> tuple[Patch, ...]:
    """``ALL`` for a script whose ``"lazarus"`` section is ``section``; engines that it makes go into ``engines``."""

    def of_section(patch: Patch) -> Patch:
        known = {"section": section, **({"engines": engines} if patch is INITIALIZE else {})}
        return replace(patch, make=partial(patch.make, **known)) if patch in _OF_SECTION else patch

    return tuple(map(of_section, ALL))


__all__ = [
    "ALL",
    "ALWAYS",
    "Patch",
    "PatchError",
    "applied",
    "apply_all",
    "drop_in",
    "state_in",
    "state_of",
    "undo_all",
    "unpatched",
]
