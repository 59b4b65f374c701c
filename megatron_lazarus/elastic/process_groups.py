"""The process groups of a generation: build them with a short limit, break them at once, forget them everywhere."""

from __future__ import annotations

import ctypes
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from megatron_lazarus.elastic.building import gloo_groups_can_be_abandoned, make
from megatron_lazarus.elastic.membership import Generation
from megatron_lazarus.elastic.settings import BUILD_TIMEOUT_S, EXIT_STUCK
from megatron_lazarus.elastic.sockets import GroupSockets
from megatron_lazarus.elastic.waiting import AbandonedWorks, CollectiveAbandoned

logger = logging.getLogger(__name__)

ABORT_LIMIT_S = 10.0
"""How long NCCL may take to abort its communicators before the process gives up."""

REACH_INTERVAL_S = 0.1


class BuildFailed(RuntimeError):
    """The process group of a generation could not be built; nothing of it is left."""


class ProcessGroups:
    """The world group of the current generation and everything made from it.

    ``collective_timeout_s`` is the limit of a collective in a live generation, ``build_timeout_s`` while it is built.
    ``spared``: see ``GroupSockets``.
    """

    def __init__(
        self,
        backend: str,
        collective_timeout_s: float,
        build_timeout_s: float = BUILD_TIMEOUT_S,
        device: torch.device | None = None,
        spared: Callable[[], set[int]] = set,
    ) -> None:
        self.backend, self._device = backend, device or torch.device("cpu")
        self._long, self._short = timedelta(seconds=collective_timeout_s), timedelta(seconds=build_timeout_s)
        self._sockets = GroupSockets(spared)
        self._works = AbandonedWorks()
        self._graveyard: list[_Grave] = []
        self._generation = 0
        self._unblocked = 0

    def build(self, generation: Generation) -> None:
        """Make and verify the world group of a generation; raises BuildFailed, with nothing left of it."""
        where = f"rank {generation.rank} of {generation.world_size}, generation {generation.number}"
        self._sockets.forget()
        self._graveyard = [grave for grave in self._graveyard if not grave.opened()]
        self._works = AbandonedWorks()
        if self.backend == "gloo":
            self._works.start()
        self._generation = generation.number
        try:
            with self._sockets.recording():
                self._init(generation)
                members = torch.ones((), dtype=torch.int64, device=self._device)
                dist.all_reduce(members)
            if int(members) != generation.world_size:
                raise BuildFailed(f"{where}: the group has {int(members)} members")
            dist.distributed_c10d._set_pg_timeout(self._long)
        except Exception as error:
            self.break_groups()
            if isinstance(error, BuildFailed):
                raise
            raise BuildFailed(f"{where}: {type(error).__name__}: {error}") from error

    def _init(self, generation: Generation) -> None:
        host, port = generation.store
        # Names of groups are counted; a build that failed has counted on some ranks only.
        dist.distributed_c10d._world.group_count = 0
        self._reach(host, port)
        options: dict[str, Any] = {"is_master": False, "wait_for_workers": False, "timeout": self._short}
        store = make(TCPStore, self._is_broken, host, port, **options)
        with gloo_groups_can_be_abandoned(self._is_broken):
            dist.init_process_group(
                self.backend,
                store=PrefixStore(f"generation{generation.number}", store),
                rank=generation.rank,
                world_size=generation.world_size,
                timeout=self._short,
            )

    def _is_broken(self) -> bool:
        return self._works.broken

    def _reach(self, host: str, port: int) -> None:
        """Wait until the store answers. TCPStore itself would do so, but could not be told to stop waiting."""
        deadline = time.monotonic() + self._short.total_seconds()
        while True:
            try:
                socket.create_connection((host, port), timeout=self._short.total_seconds()).close()
                return
            except OSError as error:
                if self._works.broken:
                    raise BuildFailed("the generation broke before its store could be reached") from error
                if time.monotonic() > deadline:
                    raise BuildFailed(f"no store at {host}:{port}: {error}") from error
                time.sleep(REACH_INTERVAL_S)

    def unblock(self, generation: int) -> None:
        """Free the main thread from a collective of that generation; called by the watchdog's thread."""
        if generation != self._generation:
            return
        self._works.broken = True
        if self.backend == "nccl":
            if self._unblocked != generation:
                self._unblocked = generation
                _abort_nccl()
            return
        if shut := self._sockets.shut():
            logger.info("generation %d is broken: shut %d connections", generation, shut)

    def break_groups(self) -> None:
        """Leave all groups without waiting for anybody, and forget them wherever they are cached.

        To be called at once when a collective fails: peers that wait for this rank are freed by it.
        """
        generation, self._generation = self._generation, 0
        if dist.is_initialized():
            if self.backend == "nccl":
                if self._unblocked != generation:
                    _abort_nccl()
            else:
                # An operation still in flight would make the destruction wait for its time-out.
                self._sockets.shut()
                if self._works.in_flight:
                    self._graveyard.append(_Grave(self._works, list(dist.distributed_c10d._world.pg_map)))
                    # It does nothing to gloo but to forget the groups.
                    dist.distributed_c10d._abort_process_group()
            if dist.is_initialized():
                dist.destroy_process_group()
        self._sockets.forget()
        forget_groups()


class _Grave:
    """Groups that cannot be destroyed yet, with the operations in flight that forbid it.

    They count as used even when the interpreter ends: destroying them then would hold the exit up for a time-out.
    """

    def __init__(self, works: AbandonedWorks, groups: list[Any]) -> None:
        self._works, self._groups = works, groups
        for group in groups:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))

    def opened(self) -> bool:
        """Whether they could be given back by now."""
        if self._works.in_flight:
            return False
        for group in self._groups:
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(group))
        return True


def _abort_nccl() -> None:
    """Abort all communicators; destroying them would wait for the dead. Ends the process if even that hangs."""
    failure: list[BaseException] = []

    def abort() -> None:
        try:
            dist.distributed_c10d._abort_process_group()
        except Exception as error:
            failure.append(error)

    thread = threading.Thread(target=abort, name="lazarus-abort", daemon=True)
    thread.start()
    thread.join(ABORT_LIMIT_S)
    if thread.is_alive():
        sys.stderr.write(f"NCCL did not abort within {ABORT_LIMIT_S:g} s; this worker stops itself\n")
        sys.stderr.flush()
        os._exit(EXIT_STUCK)
    if failure:
        logger.error("aborting NCCL failed: %s", failure[0])


_DEEPSPEED_MAPS = (
    "_EXPERT_PARALLEL_GROUP",
    "_EXPERT_PARALLEL_GROUP_RANKS",
    "_EXPERT_DATA_PARALLEL_GROUP",
    "_EXPERT_DATA_PARALLEL_GROUP_RANKS",
    "_ALL_TO_ALL_GROUP",
)
_DEEPSPEED_GROUPS = (
    "_WORLD_GROUP",
    "_ZERO_PARAM_INTRA_PARALLEL_GROUP",
    "_TENSOR_MODEL_PARALLEL_GROUP",
    "_MODEL_PARALLEL_GROUP",
    "_DATA_PARALLEL_GROUP",
)


def forget_groups() -> None:
    """Clear the registries of DeepSpeed and Megatron Core, as far as they are loaded.

    DeepSpeed's own release of them exists from 0.19.8 only. Groups kept by engines and layers are theirs to replace.
    """
    groups: Any = sys.modules.get("deepspeed.utils.groups")
    if groups is not None:
        for name in _DEEPSPEED_MAPS:
            if isinstance(value := getattr(groups, name, None), dict):
                value.clear()
            elif value is not None:
                setattr(groups, name, None)
        for name in _DEEPSPEED_GROUPS:
            if hasattr(groups, name):
                setattr(groups, name, None)
        groups.mesh_device = None
    parallel_state: Any = sys.modules.get("megatron.core.parallel_state")
    if parallel_state is not None:
        parallel_state.destroy_model_parallel()


def is_collective_error(error: BaseException) -> bool:
    """Whether an exception says that another rank has failed, rather than this one."""
    if isinstance(error, dist.DistError):
        return True
    if isinstance(error, CollectiveAbandoned):
        return True
    text = str(error)
    signs = ("gloo", "NCCL", "ProcessGroup", "Connection closed", "Connection reset", "Timed out waiting")
    return isinstance(error, RuntimeError) and any(sign in text for sign in signs)
