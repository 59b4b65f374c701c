"""A training job without training: two ranks, as threads, that save made-up state with all of the product's own code.

What the state is at a step is known, so whoever reads a checkpoint can say whether it is the right one.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megatron_lazarus.checkpoint.attempt import Save
from megatron_lazarus.checkpoint.background import BackgroundWriter
from megatron_lazarus.checkpoint.engine import FullSaves
from megatron_lazarus.checkpoint.files import CheckpointError
from megatron_lazarus.checkpoint.history import SaveHistory
from megatron_lazarus.checkpoint.loading import Loader
from megatron_lazarus.checkpoint.manifest import Manifest
from megatron_lazarus.checkpoint.parameter_groups import ParameterGroups
from megatron_lazarus.checkpoint.restore import read_dense, read_record
from megatron_lazarus.checkpoint.saving import Saver
from megatron_lazarus.moe.records import RecordBuffer, RecordLayout, TensorSpec
from megatron_lazarus.planning.plan import Placement, Plan

EXPERTS, LAYERS, RANKS, WIDTH = 4, 2, 2, 24
LIMIT_S = 60.0
LAYOUT = RecordLayout(
    (TensorSpec("w", (WIDTH, WIDTH)), TensorSpec("b", (WIDTH,))), torch.bfloat16, ("exp_avg", "exp_avg_sq")
)
Gather = Callable[[Any], list[Any]]


def value(step: int, layer: int, expert: int, field: int) -> float:
    """What every element of a record's field is after ``step``; exact in bfloat16."""
    return float((step * 31 + layer * 17 + expert * 5 + field) % 251)


@dataclass
class _Layer:
    num_experts: int


class _Experts:
    """The records of one rank: experts 0..2 on rank 0, 1..3 on rank 1."""

    def __init__(self, rank: int, world_size: int) -> None:
        slots = ((0, 1, 2), (1, 2, 3)) if world_size == RANKS else ((0, 1, 2, 3),)
        self.rank = rank
        self.plan = Plan((Placement(EXPERTS, slots),) * LAYERS, tuple(range(world_size)))
        self.layers = [_Layer(EXPERTS)] * LAYERS
        self.buffers = [RecordBuffer(LAYOUT, slots[rank], torch.device("cpu")) for _ in range(LAYERS)]
        self.context: Any = None
        self.parameter_groups = ParameterGroups((), 0, ())


class _Engine:
    """What of DeepSpeed's engine is asked for."""

    def __init__(self) -> None:
        self.module = nn.Linear(WIDTH, 3 * WIDTH)
        self.global_steps = 0


class Rank:
    """One rank of the job; all of its ranks call the same methods."""

    def __init__(self, rank: int, world_size: int, gather: Gather, settings: FullSaves) -> None:
        self.engine, self.experts = _Engine(), _Experts(rank, world_size)
        self.history = SaveHistory([EXPERTS] * LAYERS, lambda: rank, strict=False)
        self.writer = BackgroundWriter(limit_s=LIMIT_S)
        self.history.withdraw = self.writer.withdraw
        self.saver = Saver(self.engine, self.experts, settings, self.history, self.writer, gather)
        self.loader = Loader(self.engine, self.experts, gather)
        self.rank, self.gather = rank, gather

    def train(self, step: int) -> None:
        """Take on the state of a step."""
        for snapshot in self.saver.snapshots:
            snapshot.ordered()
        self.saver.snapshots.clear()
        self.engine.global_steps = step
        for layer, buffer in enumerate(self.experts.buffers):
            for slot, expert in enumerate(buffer.experts):
                for index, field in enumerate(LAYOUT.field_names):
                    buffer.field(field)[slot] = value(step, layer, expert, index)
        with torch.no_grad():
            for parameter in self.engine.module.parameters():
                parameter.fill_(step)

    def begin(self, save_dir: str, tag: str) -> Save | str:
        """The save in progress, or why there is none."""
        try:
            attempt = self.saver.agree(save_dir, tag, again=False)
        except CheckpointError as error:
            return str(error)
        step = self.engine.global_steps
        state = {"module": self.engine.module.state_dict(), "global_steps": step}
        return self.saver.begin(attempt, state, save_latest=True)

    def save(self, save_dir: str, tag: str) -> tuple[bool, str]:
        """Save and wait; (whether it is complete, why not)."""
        save = self.begin(save_dir, tag)
        if isinstance(save, str):
            return False, save
        assert save.decided.wait(LIMIT_S)
        published, reason = self.gather([save.published, save.reason])[0]
        self.history.conclude(save, published)
        return published, reason

    def load(self, save_dir: str) -> int:
        """Step of the newest checkpoint, 0 if there is none."""
        chosen = self.loader.choose(save_dir, None, True)
        if chosen is None:
            return 0
        self.history.loaded(os.path.join(save_dir, chosen[0]), chosen[1])
        return chosen[1].global_steps


class Ranks:
    """Runs functions on all ranks, each on a thread of its own."""

    def __init__(self, settings: FullSaves, world_size: int = RANKS) -> None:
        self._barrier = threading.Barrier(world_size, timeout=LIMIT_S)
        self._values: list[Any] = [None] * world_size
        self.members = [Rank(rank, world_size, self._gather_of(rank), settings) for rank in range(world_size)]

    def _gather_of(self, rank: int) -> Gather:
        def gather(mine: Any) -> list[Any]:
            self._values[rank] = mine
            self._barrier.wait()
            found = list(self._values)
            self._barrier.wait()
            return found

        return gather

    def call(self, function: Callable[[Rank], Any]) -> list[Any]:
        results: list[Any] = [None] * len(self.members)

        def run(member: Rank) -> None:
            try:
                results[member.rank] = function(member)
            except BaseException as error:
                results[member.rank] = error
                self._barrier.abort()

        threads = [threading.Thread(target=run, args=(member,)) for member in self.members]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results

    def save(self, save_dir: str, step: int, tag: str | None = None) -> tuple[bool, str]:
        """Train to a step and save it."""

        def one(member: Rank) -> tuple[bool, str]:
            member.train(step)
            return member.save(save_dir, tag or f"global_step{step}")

        result: tuple[bool, str] = self.call(one)[0]
        return result

    def settle(self) -> None:
        """Wait until the background threads are done with everything."""
        for member in self.members:
            assert all(save.finished.wait(LIMIT_S) for save in member.writer._pending)

    def close(self) -> None:
        for member in self.members:
            member.writer.close(LIMIT_S)


def newest(save_dir: str) -> tuple[str, Manifest] | None:
    """What a load takes. Raises CheckpointError where everything is damaged."""
    alone = Rank(0, 1, lambda mine: [mine], FullSaves())
    return alone.loader.choose(save_dir, None, True)


def check_content(save_dir: str, manifest: Manifest) -> None:
    """Every record is that of the step its parts are of, and the dense part is that of the checkpoint's step."""
    assert len(manifest.experts) == LAYERS * EXPERTS
    for entry in manifest.experts:
        record = read_record(save_dir, manifest, entry.layer, entry.expert)
        steps = {field: part.step for part in entry.parts for field in part.fields}
        assert set(steps) == set(LAYOUT.field_names)
        for name, tensor in record.items():
            field = name.partition("/")[0]
            index = LAYOUT.field_names.index(field)
            wanted = value(steps[field], entry.layer, entry.expert, index)
            assert bool((tensor == wanted).all()), f"{entry.what}: {name} is {tensor.flatten()[0]}, not {wanted}"
    state = read_dense(save_dir, manifest)
    assert state["global_steps"] == manifest.global_steps
    weights: Tensor
    for weights in state["module"].values():
        assert bool((weights == manifest.global_steps).all())


def check_files(save_dir: str) -> None:
    """No file that a live manifest names is missing."""
    for path in Path(save_dir).glob("*/manifest.json"):
        manifest = Manifest.read(str(path.parent))
        for tag, entry, what in manifest.all_files():
            file = Path(save_dir, tag, entry.name)
            assert file.is_file(), f"{file} ({what}), named by {path}, is missing"
            assert file.stat().st_size == entry.bytes
