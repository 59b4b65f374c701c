"""Overrides in ``deepspeed`` itself."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from megatron_lazarus.patches.deepspeed_comm import INIT_DISTRIBUTED
from megatron_lazarus.patches.registry import Patch


def to_lazarus(
    original: Callable[..., Any], section: Any = None, engines: list[Any] | None = None
) -> Callable[..., Any]:
    """``deepspeed.initialize`` for configs whose ``"lazarus"`` section, by default ``section``, is enabled.

    The engines it makes are added to ``engines``.
    """

    @functools.wraps(original)
    def initialize(*arguments: Any, **options: Any) -> Any:
        from megatron_lazarus.script import initialize_script

        return initialize_script(original, section, engines, *arguments, **options)

    return initialize


INITIALIZE = Patch(
    target="deepspeed:initialize",
    kind="wrap",
    make=to_lazarus,
    reason="a script's deepspeed.initialize returns the engine that survives failures; for configs without an enabled "
    '"lazarus" section it does what it always did',
    upstream="none known",
    remove_when="DeepSpeed lets a configuration choose the class of its engine",
    distribution="deepspeed",
    versions=">=0.18.9,<0.20",
    signature="(args=None, model=None, optimizer=None, model_parameters=None, training_data=None, lr_scheduler=None, "
    "distributed_port=TORCH_DISTRIBUTED_DEFAULT_PORT, mpu=None, dist_init_required=None, collate_fn=None, config=None, "
    "mesh_param=None, config_params=None)",
    fingerprints={"0.18.9": "8df3d7d82ba1fe47", "0.19.8": "70df3c12712d3a6a"},
)

INIT_DISTRIBUTED_AT_TOP = replace(
    INIT_DISTRIBUTED,
    target="deepspeed:init_distributed",
    reason="the name by which scripts call it: see deepspeed.comm.comm:init_distributed",
)
