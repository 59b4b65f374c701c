"""Overrides in ``deepspeed.moe.layer``."""

from __future__ import annotations

from typing import Any

from megatron_lazarus.patches.registry import Patch


def adaptive_layer(original: Any) -> Any:
    """The class that stands in the place of DeepSpeed's."""
    from megatron_lazarus.moe.drop_in import MoE

    return MoE


SIGNATURE = (
    "(self, hidden_size, expert, num_experts=1, ep_size=1, k=1, capacity_factor=1.0, eval_capacity_factor=1.0, "
    "min_capacity=4, use_residual=False, noisy_gate_policy=None, drop_tokens=True, use_rts=True, use_tutel=False, "
    "enable_expert_tensor_parallelism=False, top2_2nd_expert_sampling=True)"
)
FINGERPRINTS = {"0.18.9": "7ab5855124c61d06", "0.19.8": "7ab5855124c61d06"}

MOE = Patch(
    target="deepspeed.moe.layer:MoE",
    kind="replace",
    make=adaptive_layer,
    reason="models that construct deepspeed.moe.layer.MoE get the layer whose experts may live on any rank; "
    "DeepSpeed's engine has a reference of its own to the original class, and treats this one as any other module",
    upstream="none known",
    remove_when="DeepSpeed's engine lets a configuration choose the class of MoE layers",
    distribution="deepspeed",
    versions=">=0.18.9,<0.20",
    signature=SIGNATURE,
    fingerprints=FINGERPRINTS,
)
