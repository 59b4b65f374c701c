"""How a process that an agent has started gets its link to the coordinator."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_lazarus.config import LazarusConfig
from megatron_lazarus.elastic.membership import Membership
from megatron_lazarus.recovery import Elastic


def joins_coordinator(config: LazarusConfig) -> bool:
    """Whether this process was started by an agent, to train in generations."""
    return config.elastic.enabled and "LAZARUS_COORDINATOR" in os.environ


def without_shared_memory_extension() -> None:
    """Keep DeepSpeed from compiling it when its back end is made.

    A worker that is killed meanwhile leaves a lock for which every later start would wait.
    """
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def private_world() -> None:
    """A world of this process alone, without an address, in which constructors may run their collectives."""
    from deepspeed.accelerator import get_accelerator

    if dist.is_initialized():
        return
    os.environ.setdefault("LOCAL_RANK", "0")
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(get_accelerator().communication_backend_name(), store=store, rank=0, world_size=1)


def elastic_from_environment(ds_config: Mapping[str, Any]) -> Elastic:
    """The link to the coordinator under whose agent this process runs.

    Members must agree on versions, on the package's and the script's code, and on ``ds_config``.
    """
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    import megatron_lazarus

    script = getattr(sys.modules["__main__"], "__file__", None)
    sources = sorted(Path(megatron_lazarus.__file__).parent.rglob("*.py"))
    check = {
        "torch": torch.__version__,
        "deepspeed": deepspeed.__version__,
        "megatron_lazarus": megatron_lazarus.__version__,
        "code": _digest(path.read_bytes() for path in sources),
        "script": _digest([Path(script).read_bytes()] if script else []),
        "config": _digest([json.dumps(ds_config, sort_keys=True, default=str).encode()]),
    }
    accelerator = get_accelerator()
    # Before DeepSpeed does the same: the first collectives of the membership come earlier.
    accelerator.set_device(int(os.environ["LOCAL_RANK"]))
    device = torch.device(accelerator.current_device_name())
    return Elastic(Membership.from_environment(check), accelerator.communication_backend_name(), device)


def _digest(parts: Iterable[bytes]) -> str:
    total = hashlib.sha256()
    for part in parts:
        total.update(hashlib.sha256(part).digest())
    return total.hexdigest()[:16]
