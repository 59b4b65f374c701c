"""Saves that fail, or take long, while training goes on: it is the same training, and every rank knows what failed."""

from __future__ import annotations

import dataclasses
import errno
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lazarus.checkpoint import memory, saving
from megatron_lazarus.checkpoint.files import CheckpointError
from megatron_lazarus.checkpoint.manifest import Manifest, read_latest
from tests.distributed.pool import Pools, WorkersFailed
from tests.distributed.runs import Run, build, train

RUN = Run(micro_batches=3, experts=4, section={"checkpoint": {"persist_experts": 1}})
LIMIT_S = 60.0


def undisturbed(rank: int, world: int, run: Run, steps: int) -> list[float]:
    engine, ledger = build(rank, world, dataclasses.replace(run, section={}))
    return train(engine, ledger, run, steps).losses


def _steps_until(engine: Any, ledger: Any, run: Run, done: Any) -> list[float]:
    """Train until every rank's ``done()`` is true, which votes make happen at the same step."""
    losses = []
    deadline = time.monotonic() + LIMIT_S
    while not done():
        assert time.monotonic() < deadline
        losses += train(engine, ledger, run, 1).losses
    return losses


def full_disk(rank: int, world: int, directory: str, run: Run) -> tuple[list[float], int, str, list[str]]:
    """The second save fails on rank 1."""
    engine, ledger = build(rank, world, run)
    history = engine._checkpoint.history
    losses = train(engine, ledger, run, 1).losses
    assert engine.save_checkpoint(directory)
    losses += _steps_until(engine, ledger, run, lambda: history.newest is not None)
    write = engine._checkpoint.writer._write_record

    def fails(*arguments: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    if rank == 1:
        engine._checkpoint.writer._write_record = fails
    failed = engine.global_steps
    assert engine.save_checkpoint(directory, tag="unlucky")
    losses += _steps_until(engine, ledger, run, lambda: history.failures)
    engine._checkpoint.writer._write_record = write
    deadline = time.monotonic() + LIMIT_S
    while os.path.exists(os.path.join(directory, "unlucky")) and time.monotonic() < deadline:
        time.sleep(0.01)
    left = os.listdir(directory)
    assert engine.save_checkpoint(directory, tag="lucky", wait=True)
    assert failed < engine.global_steps
    engine.finish()
    return losses, history.failures, str(history.newest), left


def test_failed_save(workers: Pools, tmp_path: Path) -> None:
    folder = str(tmp_path / "saves")
    # All experts, so that rank 1 has something to write.
    run = dataclasses.replace(RUN, section={"checkpoint": {}})
    ranks = workers(3)(full_disk, folder, run, timeout=120)
    losses = ranks[0][0]
    assert losses == workers(3)(undisturbed, run, len(losses), timeout=120)[0], "training was disturbed"
    for other, failures, newest, left in ranks:
        assert other == losses
        assert failures == 1
        assert newest == os.path.join(folder, "lucky")
        assert "unlucky" not in left
    assert read_latest(folder) == "lucky"
    for tag in ("global_step1", "lucky"):
        Manifest.read(os.path.join(folder, tag)).verify(os.path.join(folder, tag))


def strict(rank: int, world: int, directory: str, run: Run) -> str:
    engine, ledger = build(rank, world, run)
    train(engine, ledger, run, 1)
    if rank == world - 1:
        engine._checkpoint.writer.write_files = lambda save: 1 // 0
    engine.save_checkpoint(directory)
    with pytest.raises(CheckpointError) as caught:
        _steps_until(engine, ledger, run, lambda: False)
    return f"{engine.global_steps}: {caught.value}"


def test_strict_stops_all_ranks_at_the_same_step(workers: Pools, tmp_path: Path) -> None:
    run = dataclasses.replace(RUN, section={"checkpoint": {"strict": True}})
    messages = workers(3)(strict, str(tmp_path), run, timeout=120)
    assert len({message.partition(":")[0] for message in messages}) == 1
    assert all('"lazarus.checkpoint.strict" is true' in message for message in messages)
    assert "ZeroDivisionError" in messages[0]


def slow_storage(rank: int, world: int, directory: str, run: Run) -> tuple[list[bool], float, int]:
    """Nothing gets written on the last rank until all saves were tried."""
    saving.STALL_LIMIT_S, limit = 0.2, saving.STALL_LIMIT_S
    engine, ledger = build(rank, world, run)
    gate = threading.Event()
    write = engine._checkpoint.writer.write_files
    if rank == world - 1:
        engine._checkpoint.writer.write_files = lambda save: (gate.wait(LIMIT_S), write(save))[1]
    answers, longest = [], 0.0
    try:
        for _ in range(5):
            train(engine, ledger, run, 1)
            started = time.monotonic()
            answers.append(engine.save_checkpoint(directory))
            longest = max(longest, time.monotonic() - started)
        train(engine, ledger, run, 1)
    finally:
        gate.set()
        saving.STALL_LIMIT_S = limit
    engine.finish()
    return answers, longest, engine._checkpoint.history.failures


def test_slow_writer_does_not_stall_training(workers: Pools, tmp_path: Path) -> None:
    for answers, _, failures in workers(2)(slow_storage, str(tmp_path), RUN, timeout=120):
        # Three buffers; who comes later is turned away.
        assert answers == [True, True, True, False, False]
        assert failures == 2
    assert read_latest(str(tmp_path)) == "global_step3"


def silent_writer(rank: int, world: int, directory: str, run: Run) -> tuple[int, bool]:
    engine, ledger = build(rank, world, run)
    engine._checkpoint.writer.limit_s = 0.5
    if rank == 1:
        engine._checkpoint.writer.write_files = lambda save: {}
    train(engine, ledger, run, 1)
    engine.save_checkpoint(directory)
    _steps_until(engine, ledger, run, lambda: engine._checkpoint.history.failures)
    engine.finish()
    return engine._checkpoint.history.failures, os.path.exists(os.path.join(directory, "latest"))


def test_writer_that_says_nothing_is_given_up(workers: Pools, tmp_path: Path) -> None:
    assert workers(2)(silent_writer, str(tmp_path), RUN, timeout=120) == [(1, False)] * 2
    assert list(tmp_path.glob("global_step*")) == []


def slow_copy(rank: int, world: int, directory: str, run: Run) -> list[dict[tuple[int, int], Any]]:
    """The copy takes longer than forward and backward: the update has to wait for it."""
    copy = memory.Snapshot._copy

    def late(snapshot: memory.Snapshot) -> None:
        time.sleep(0.5)
        copy(snapshot)

    memory.Snapshot._copy = late  # type: ignore[method-assign]
    try:
        engine, ledger = build(rank, world, run)
        train(engine, ledger, run, 1)
        before = {
            (layer, expert): buffer.rows[slot].clone()
            for layer, buffer in enumerate(engine.experts.buffers)
            for slot, expert in enumerate(buffer.experts)
        }
        dense = [parameter.detach().clone() for parameter in engine.module.parameters()]
        engine.save_checkpoint(directory)
        train(engine, ledger, run, 3)
        engine.finish()
    finally:
        memory.Snapshot._copy = copy  # type: ignore[method-assign]
    engine.load_checkpoint(directory)
    for parameter, old in zip(engine.module.parameters(), dense, strict=True):
        assert torch.equal(parameter, old), "the dense part was changed while it was copied"
    for layer, buffer in enumerate(engine.experts.buffers):
        for slot, expert in enumerate(buffer.experts):
            assert torch.equal(buffer.rows[slot], before[layer, expert]), "a record was changed while it was copied"
    return []


def test_update_waits_for_the_copy(workers: Pools, tmp_path: Path) -> None:
    workers(2)(slow_copy, str(tmp_path), RUN, timeout=120)


def save_twice(rank: int, world: int, directory: str, run: Run) -> None:
    engine, ledger = build(rank, world, run)
    for _ in range(2):
        train(engine, ledger, run, 1)
        engine.save_checkpoint(directory, wait=True)
    engine.finish()


def load_newest(rank: int, world: int, directory: str, run: Run, tag: str | None = None) -> tuple[str, int]:
    engine, _ = build(rank, world, run)
    path, _ = engine.load_checkpoint(directory, tag)
    return path, engine.global_steps


@pytest.mark.parametrize("name", ["experts/layer_1_expert_2.safetensors", "dense/*.safetensors", "manifest.json"])
def test_falls_back_to_the_previous_checkpoint(workers: Pools, tmp_path: Path, name: str) -> None:
    run = dataclasses.replace(RUN, section={"checkpoint": {}})
    workers(2)(save_twice, str(tmp_path), run, timeout=120)
    path = next((tmp_path / "global_step2").glob(name))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    for answer in workers(3)(load_newest, str(tmp_path), run, timeout=120):
        assert answer == (str(tmp_path / "global_step1"), 1)
    with pytest.raises(WorkersFailed, match=path.name):
        # Asked for by name, another one will not do.
        workers(2)(load_newest, str(tmp_path), run, "global_step2", timeout=120)
