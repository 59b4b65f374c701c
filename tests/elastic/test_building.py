"""Generations that break while their process group is being made, by a store that dies and peers that give up."""

from __future__ import annotations

import multiprocessing
import os
import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_lazarus.elastic.building import MakingAbandoned, make
from megatron_lazarus.elastic.interfaces import interface_of
from megatron_lazarus.elastic.membership import Generation
from megatron_lazarus.elastic.process_groups import BuildFailed, ProcessGroups
from megatron_lazarus.elastic.settings import RESOLVER_OPTIONS
from megatron_lazarus.elastic.stores import host_store

pytestmark = pytest.mark.distributed

RANKS, ROUNDS = 3, 40
FREE_LIMIT_S = 10.0
"""Less than the limit of building, which an attempt that cannot be given up would take."""


@contextmanager
def breaking(groups: ProcessGroups, number: int, after_s: float) -> Iterator[None]:
    """The watchdog's part, played by a thread."""
    stop = threading.Event()

    def watch() -> None:
        stop.wait(after_s)
        while not stop.is_set():
            groups.unblock(number)
            stop.wait(0.05)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def alone_again(groups: ProcessGroups) -> None:
    """Another generation can be built, as if nothing had been."""
    assert not dist.is_initialized()
    port, store = host_store("127.0.0.1")
    groups.build(Generation(9, 0, 1, (), ("127.0.0.1", port), "failure"))
    assert dist.get_world_size() == 1
    assert type(dist.distributed_c10d.ProcessGroupGloo).__name__ == "pybind11_type"
    groups.break_groups()
    assert store is not None


def test_errors_and_results_are_those_of_the_constructor() -> None:
    assert make(dict, lambda: True, [("a", 1)], b=2) == {"a": 1, "b": 2}
    with pytest.raises(ZeroDivisionError):
        make(lambda: 1 // 0, lambda: False)


def test_a_store_that_accepts_and_says_nothing() -> None:
    groups = ProcessGroups("gloo", 60.0, build_timeout_s=60.0)
    with socket.create_server(("127.0.0.1", 0)) as silent, breaking(groups, 8, 0.2):
        port = silent.getsockname()[1]
        with pytest.raises(BuildFailed, match="TCPStore: the generation broke while it was made"):
            groups.build(Generation(8, 0, 2, (), ("127.0.0.1", port), "failure"))
    alone_again(groups)


def test_a_group_that_is_never_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gloo's constructor, where its connections are shut at the wrong moment."""
    never = threading.Event()

    def hangs(*_: Any, **__: Any) -> None:
        never.wait()

    groups = ProcessGroups("gloo", 60.0, build_timeout_s=60.0)
    port, store = host_store("127.0.0.1")
    with monkeypatch.context() as patch, breaking(groups, 8, 0.2):
        patch.setattr(dist.distributed_c10d, "ProcessGroupGloo", hangs)
        with pytest.raises(BuildFailed, match=f"{MakingAbandoned.__name__}: hangs"):
            groups.build(Generation(8, 0, 2, (), ("127.0.0.1", port), "failure"))
    never.set()
    assert store is not None
    alone_again(groups)


def build_again_and_again(rank: int, orders: Connection) -> None:
    os.environ.update(RESOLVER_OPTIONS, GLOO_SOCKET_IFNAME=interface_of("127.0.0.1") or "lo")
    torch.set_num_threads(1)
    groups = ProcessGroups("gloo", 60.0)
    orders.send("ready")
    while (order := orders.recv()) is not None:
        number, port, after_s = order
        with breaking(groups, number, after_s):
            try:
                groups.build(Generation(number, rank, RANKS, (), ("127.0.0.1", port), "failure"))
                while True:
                    dist.all_reduce(torch.ones(3))
            except RuntimeError as error:
                orders.send(f"{type(error).__name__}: {error}")
            groups.break_groups()


def serve_store(orders: Connection) -> None:
    port, store = host_store("127.0.0.1")
    orders.send(port)
    orders.recv()
    del store


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.extensive)])
def test_coordinator_and_peers_are_lost_at_any_moment(seed: int) -> None:
    """Its store dies with the coordinator; the next one breaks the generation, and everybody must come out of it."""
    chance, context = random.Random(seed), multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    pipes = [context.Pipe() for _ in range(RANKS)]
    ranks = [
        context.Process(target=build_again_and_again, args=(rank, theirs), daemon=True)
        for rank, (_, theirs) in enumerate(pipes)
    ]
    for process in ranks:
        process.start()
    try:
        for ours, _ in pipes:
            assert ours.poll(60.0)
            assert ours.recv() == "ready"
        for number in range(1, ROUNDS + 1):
            ours_of_store, theirs_of_store = context.Pipe()
            store = context.Process(target=serve_store, args=(theirs_of_store,), daemon=True)
            store.start()
            assert ours_of_store.poll(60.0)
            port = ours_of_store.recv()
            for ours, _ in pipes:
                ours.send((number, port, 0.05 + 0.15 * chance.random()))
            time.sleep(0.03 * chance.random())
            store.kill()
            store.join()
            for rank, (ours, _) in enumerate(pipes):
                assert ours.poll(FREE_LIMIT_S), f"seed {seed}, round {number}: rank {rank} is left in it"
                ours.recv()
    finally:
        for process in ranks:
            process.kill()
            process.join()
