"""Overrides in ``deepspeed.moe.utils``."""

from __future__ import annotations

from dataclasses import replace

from megatron_lazarus.patches.deepspeed_moe_layer import MOE

MOE_IN_UTILS = replace(
    MOE,
    target="deepspeed.moe.utils:MoE",
    reason="has_moe_layers(model), by which scripts ask for MoE layers, looks for instances of the class by this name",
)
