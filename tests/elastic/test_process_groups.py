"""Groups that are broken while all their members are in the middle of collectives."""

from __future__ import annotations

import multiprocessing
import os
import random
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from megatron_lazarus.elastic.interfaces import interface_of
from megatron_lazarus.elastic.membership import Generation
from megatron_lazarus.elastic.process_groups import BuildFailed, ProcessGroups, is_collective_error
from megatron_lazarus.elastic.settings import RESOLVER_OPTIONS
from megatron_lazarus.elastic.stores import host_store

pytestmark = pytest.mark.distributed

RANKS = 3
ROUNDS = 25
GROUP_LIMIT_S = 8.0
LIMIT_S = 120.0


def break_again_and_again(rank: int, port: int, results: str) -> None:
    """The watchdog's part is played by a thread: it breaks every generation at a random moment."""
    os.environ.update(RESOLVER_OPTIONS, GLOO_SOCKET_IFNAME=interface_of("127.0.0.1") or "lo")
    torch.set_num_threads(1)
    control = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=LIMIT_S))
    chance, worst = random.Random(rank), 0.0
    groups = ProcessGroups("gloo", GROUP_LIMIT_S)
    usage = []
    for number in range(1, ROUNDS + 1):
        groups.build(Generation(number, rank, RANKS, (), ("127.0.0.1", port), "failure"))
        broken = [0.0]
        freed = threading.Event()

        def watch(number: int = number, broken: list[float] = broken, freed: threading.Event = freed) -> None:
            time.sleep(0.02 + 0.005 * chance.random())
            broken[0] = time.monotonic()
            while not freed.is_set():
                groups.unblock(number)
                freed.wait(0.05)

        watchdog = threading.Thread(target=watch)
        watchdog.start()
        try:
            while True:
                dist.all_to_all_single(torch.empty(RANKS), torch.empty(RANKS))
                dist.all_reduce(torch.empty(1 << 16))
        except RuntimeError as error:
            if not is_collective_error(error):
                raise
            # Another rank may have closed its connections before our own watchdog looked.
            worst = max(worst, time.monotonic() - broken[0] if broken[0] else 0.0)
        groups.break_groups()
        assert not dist.is_initialized()
        freed.set()
        watchdog.join()
        usage.append(len(os.listdir("/proc/self/fd")))
        control.add(f"end {number}", 1)
        while control.add(f"end {number}", 0) < RANKS:
            time.sleep(0.002)
    # Groups with an operation in flight are kept until it times out.
    time.sleep(GROUP_LIMIT_S + 1)
    groups.build(Generation(ROUNDS + 1, rank, RANKS, (), ("127.0.0.1", port), "failure"))
    groups.break_groups()
    usage.append(len(os.listdir("/proc/self/fd")))
    Path(results, str(rank)).write_text(f"{worst} {usage[0]} {usage[-1]}")


def test_nobody_is_left_in_a_broken_group(tmp_path: Path) -> None:
    port, store = host_store("127.0.0.1")
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=break_again_and_again, args=(rank, port, str(tmp_path)), daemon=True)
        for rank in range(RANKS)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + LIMIT_S
    for process in processes:
        process.join(max(0.1, deadline - time.monotonic()))
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert codes == [0] * RANKS
    for rank in range(RANKS):
        worst, before, after = map(float, (tmp_path / str(rank)).read_text().split())
        print(f"rank {rank}: freed within {worst:.3f} s")
        assert worst < 5
        assert after <= before + 3
    assert store is not None


def test_a_member_that_is_missing_fails_the_build() -> None:
    port, store = host_store("127.0.0.1")
    groups = ProcessGroups("gloo", GROUP_LIMIT_S, build_timeout_s=1.0)
    with pytest.raises(BuildFailed, match="rank 0 of 2, generation 7"):
        groups.build(Generation(7, 0, 2, (), ("127.0.0.1", port), "start"))
    assert not dist.is_initialized()
    groups.build(Generation(8, 0, 1, (), ("127.0.0.1", port), "failure"))
    assert dist.get_world_size() == 1
    groups.break_groups()
    assert not dist.is_initialized()
    assert store is not None


def test_errors_of_collectives_are_told_from_ones_own() -> None:
    assert is_collective_error(dist.DistNetworkError("x"))
    assert is_collective_error(RuntimeError("[../gloo/transport/tcp/pair.cc:553] Connection closed by peer"))
    assert not is_collective_error(RuntimeError("CUDA out of memory"))
    assert not is_collective_error(ValueError("gloo"))
