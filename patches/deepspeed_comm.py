"""Overrides in ``deepspeed.comm``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from megatron_lazarus.patches.registry import Patch


def in_a_private_world(original: Callable[..., Any], section: Any = None) -> Callable[..., Any]:
    """``init_distributed`` that under a coordinator finds a world of this process alone."""

    @functools.wraps(original)
    def init_distributed(*arguments: Any, **options: Any) -> Any:
        from megatron_lazarus.script import prepare_world

        prepare_world(section)
        return original(*arguments, **options)

    return init_distributed


INIT_DISTRIBUTED = Patch(
    target="deepspeed.comm.comm:init_distributed",
    kind="wrap",
    make=in_a_private_world,
    reason="under a coordinator ranks have no number before they meet, and may come at any time: what a script does "
    "before deepspeed.initialize happens in a world of its process alone",
    upstream="none known",
    remove_when="DeepSpeed can form its world again after it has begun to train",
    distribution="deepspeed",
    versions=">=0.18.9,<0.20",
    signature="(dist_backend=None, auto_mpi_discovery=True, distributed_port=TORCH_DISTRIBUTED_DEFAULT_PORT, "
    "verbose=True, timeout=default_pg_timeout, init_method=None, dist_init_required=None, config=None, rank=-1, "
    "world_size=-1)",
    fingerprints={"0.18.9": "c0301721ff56fefe", "0.19.8": "3ef138459da66392"},
)

INIT_DISTRIBUTED_IN_PACKAGE = replace(
    INIT_DISTRIBUTED,
    target="deepspeed.comm:init_distributed",
    reason="the name by which DeepSpeed itself calls it: see deepspeed.comm.comm:init_distributed",
)
