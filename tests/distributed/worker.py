"""One process of a worker pool: runs functions of the tests inside a process group, one after the other.

Started by ``pool.py`` as ``python -m tests.distributed.worker RANK WORLD_SIZE CONNECTION STACKS PARENT STORE_PORT``.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import itertools
import os
import pickle
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import distributed
from torch.distributed import PrefixStore, TCPStore, distributed_c10d  # type: ignore[attr-defined]

# SIGUSR1 and SIGTERM belong to the code under test, which installs handlers of its own.
DUMP_SIGNAL = int(signal.SIGRTMIN)
PR_SET_PDEATHSIG = 1
READY = "ready"
# Long, because it says nothing about the test: on a busy machine a connection was seen to take eight seconds.
JOIN_LIMIT = timedelta(seconds=40)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the parent ends, however it ends."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def join_world(store: TCPStore, generation: int, rank: int, world_size: int) -> None:
    """Build a new default process group that torch and DeepSpeed share."""
    import deepspeed
    import deepspeed.comm
    import deepspeed.ops

    # Its build takes a lock without an owner: a worker killed meanwhile would block DeepSpeed on the whole machine.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    prefix = PrefixStore(f"generation{generation}", store)
    distributed.init_process_group("gloo", store=prefix, rank=rank, world_size=world_size, timeout=JOIN_LIMIT)
    if deepspeed.comm.comm.cdb is None:
        deepspeed.init_distributed("gloo", verbose=False)


def limit_collectives(seconds: float) -> None:
    """Have a collective whose peers do not come fail after so long."""
    limit = timedelta(seconds=seconds)
    distributed_c10d._set_pg_timeout(limit)
    # Groups made without a time-out of their own, as DeepSpeed's are, would else wait for half an hour.
    distributed_c10d.default_pg_timeout = limit


def leave_world() -> None:
    """Close every process group and empty the registries that DeepSpeed and Megatron keep of them."""
    parallel_state = sys.modules.get("megatron.core.parallel_state")
    if parallel_state is not None:
        if parallel_state.model_parallel_is_initialized():
            parallel_state.destroy_model_parallel()
        from megatron.core.num_microbatches_calculator import unset_num_microbatches_calculator

        unset_num_microbatches_calculator()
    import deepspeed.comm
    from deepspeed.utils import groups

    if distributed.is_initialized():
        deepspeed.comm.destroy_process_group()
    # DeepSpeed empties them itself only since 0.19.8, and not when a test has closed the world through torch.
    groups._EXPERT_PARALLEL_GROUP.clear()
    groups._EXPERT_PARALLEL_GROUP_RANKS.clear()
    groups._EXPERT_DATA_PARALLEL_GROUP.clear()
    groups._EXPERT_DATA_PARALLEL_GROUP_RANKS.clear()
    groups._WORLD_GROUP = None
    groups.mpu = None


def reset(environment: dict[str, str]) -> None:
    """Undo what a test may have left in the process."""
    leave_world()
    if dict(os.environ) != environment:
        os.environ.clear()
        os.environ.update(environment)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.set_num_threads(1)
    if torch.are_deterministic_algorithms_enabled():
        # Not unconditionally: it imports torch's compiler, which takes seconds.
        torch.use_deterministic_algorithms(False)
    gc.collect()


def seed_everything() -> None:
    """The same seeds for every test, whatever ran before."""
    random.seed(0)
    torch.manual_seed(0)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(0)


def run(payload: bytes, rank: int, world_size: int) -> tuple[Any, ...]:
    """Call the test's function and return the message that tells how it ended."""
    try:
        function: Callable[..., Any]
        function, arguments = pickle.loads(payload)
        return "returned", pickle.dumps(function(rank, world_size, *arguments))
    except BaseException as error:
        # Test functions that call sys.exit() must not end the pool, hence BaseException.
        return "raised", time.monotonic(), type(error).__name__, traceback.format_exc()


def main() -> None:
    rank, world_size, connection_fd, stacks_fd, parent, store_port = (int(argument) for argument in sys.argv[1:])
    die_with_parent(parent)
    for descriptor in (connection_fd, stacks_fd):
        os.set_inheritable(descriptor, False)
    faulthandler.enable(file=stacks_fd)
    faulthandler.register(DUMP_SIGNAL, file=stacks_fd, all_threads=True)
    connection = Connection(connection_fd)
    store = TCPStore("127.0.0.1", store_port, is_master=False, timeout=JOIN_LIMIT)
    import deepspeed  # noqa: F401  (the import is what makes a pool worth keeping)

    environment = dict(os.environ)
    # The collections after each test then skip the half million objects of torch and DeepSpeed.
    gc.collect()
    gc.freeze()
    for generation in itertools.count():
        # Every test gets a new world, built while the parent is busy with something else. One that cannot be built ends
        # the worker, and with it the pool: torch counts failed attempts, and ranks that disagree never meet again.
        reset(environment)
        join_world(store, generation, rank, world_size)
        seed_everything()
        connection.send(READY)
        group_limit, sys.path[:], payload = connection.recv()
        limit_collectives(group_limit)
        answer = run(payload, rank, world_size)
        connection.send(answer)
        if answer[0] == "raised":
            # Peers that wait for this rank in a collective notice at once when its sockets close.
            leave_world()
        # Not before every rank has answered: closing sockets earlier would fail the others' last collectives.
        connection.recv()


if __name__ == "__main__":
    with contextlib.suppress(EOFError):
        main()
