"""Re-points a DeepSpeedEngine at another world, in place: the user's references to it stay valid.

At ZeRO stage 0 nothing that DeepSpeed holds is divided by rank; what it caches of the world is a dozen fields.
"""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist


def repoint(ds_engine: Any, rank: int, world_size: int, micro_batches: int) -> None:
    """Have ``ds_engine`` use the default process group that is initialised now, as ``rank`` of ``world_size``."""
    from deepspeed.utils import groups

    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(rank), str(world_size)
    ds_engine.world_size, ds_engine.global_rank = world_size, rank
    if groups._WORLD_GROUP is None:
        # DeepSpeed would clone the world group, which takes as long to connect as the first one, and may fail as well.
        groups._WORLD_GROUP = dist.group.WORLD
    ds_engine.data_parallel_group = groups._get_data_parallel_group()
    ds_engine.dp_world_size = groups._get_data_parallel_world_size()
    ds_engine.seq_data_parallel_group = groups._get_sequence_data_parallel_group()
    ds_engine.seq_dp_world_size = groups._get_sequence_data_parallel_world_size()
    ds_engine.expert_parallel_group = groups._get_expert_parallel_group_dict()
    ds_engine.expert_data_parallel_group = groups._get_expert_data_parallel_group_dict()
    ds_engine.save_non_zero_checkpoint = rank == 0
    ds_engine._config.world_size = world_size
    ds_engine._config.gradient_accumulation_steps = -(-micro_batches // world_size)
