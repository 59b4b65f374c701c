"""A member of an elastic run: trains ``TinyMoE`` and writes down what it did, for the test to compare.

Every line of ``<log dir>/ledger-<pid>.jsonl`` is flushed before the run goes on: ``sample`` when a micro-batch's loss
got a gradient, ``step`` when the step was committed here, ``eval``, and ``end`` with digests of all state.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import torch

from megatron_lazarus.joining import private_world
from tests.chaos.faults import Faults, faults_while_joining
from tests.chaos.script_worker import ScriptWorker
from tests.distributed.drifting import force, moving
from tests.distributed.runs import Run, build
from tests.distributed.tiny import CLASSES, batch

EVAL_BATCHES = 5
HOLD = "hold"
"""While a file of this name is in the log folder, members do not go on: a newcomer may need long to start."""


class _Recorder(list[tuple[int, int]]):
    """Stands for the ledger's list of samples."""

    def __init__(self, worker: Worker) -> None:
        super().__init__()
        self._worker = worker

    def append(self, sample: tuple[int, int]) -> None:
        self._worker.write("sample", step=sample[0], number=sample[1])


class Worker:
    """``options``: of this class, as named below; ``dtype`` by name; all others are those of ``Run``."""

    def __init__(self, log_dir: Path, options: dict[str, Any]) -> None:
        self.log_dir = log_dir
        self.hold = log_dir / HOLD
        self.steps = options.pop("total_steps")
        self.pause = options.pop("pause_s", 0.0)
        self.save_every = options.pop("save_every", 0)
        self.eval_every = options.pop("eval_every", 0)
        self.reload, self.ask = options.pop("reload", False), options.pop("ask", False)
        self.surprise = options.pop("surprise", -1)
        hot_steps = options.pop("hot_expert", 0)
        self.measure = options.pop("measure", False)
        options["dtype"] = getattr(torch, options.get("dtype", "float64"))
        self.ledger = (log_dir / f"ledger-{os.getpid()}.jsonl").open("a")
        text = os.environ.get("CHAOS_FAULT", "")
        faults_while_joining(text)
        self.engine, self.samples = build(0, 1, Run(**options))
        self.samples.samples = _Recorder(self)
        if hot_steps:
            force(self.engine, moving(options["experts"], hot_steps))
        self.faults = Faults(text, self.engine)

    @property
    def generation(self) -> int:
        elastic = self.engine._elastic
        return 0 if elastic is None else elastic.membership.generation.number

    def write(self, kind: str, **fields: Any) -> None:
        line = {"kind": kind, "time": time.time(), "generation": self.generation, **fields}
        self.ledger.write(json.dumps(line) + "\n")
        self.ledger.flush()

    def data(self, step: int, number: int) -> dict[str, torch.Tensor]:
        self.samples._current = (step, number)
        time.sleep(self.pause)
        while self.hold.exists():
            time.sleep(0.01)
        self.faults.at_data(step)
        values = batch(step, number)
        if step == self.surprise:
            values["labels"] = (values["labels"] + 5) % CLASSES
        return values

    def eval_data(self, step: int, number: int) -> dict[str, torch.Tensor]:
        return batch(1_000_000 + step, number)

    def train(self) -> None:
        engine = self.engine
        while engine.global_steps < self.steps:
            result = engine.train_batch(self.data)
            where = {"rank": engine.rank, "world": engine.world_size, "pid": os.getpid()}
            self.write("step", step=result.step, loss=result.loss, norm=result.grad_norm, **where)
            if self.eval_every and engine.global_steps % self.eval_every == 0:
                self.evaluate()
            if self.save_every and engine.global_steps % self.save_every == 0:
                engine.save_checkpoint(str(self.log_dir / "checkpoint"))
                if self.reload:
                    engine.load_checkpoint(str(self.log_dir / "checkpoint"))
            if self.ask:
                assert engine.any_rank([engine.rank == engine.world_size - 1, False]) == [True, False]
            if self.measure:
                self.write("size", **_size())
        self.evaluate()
        dense = hashlib.sha256(b"".join(_bytes(p) for p in engine.module.parameters())).hexdigest()
        records = [
            [layer, expert, hashlib.sha256(_bytes(buffer.rows[slot])).hexdigest()]
            for layer, buffer in enumerate(engine.experts.buffers)
            for slot, expert in enumerate(buffer.experts)
        ]
        self.write("end", rank=engine.rank, world=engine.world_size, dense=dense, records=records)
        engine.finish()

    def evaluate(self) -> None:
        step = self.engine.global_steps
        self.write("eval", step=step, loss=self.engine.eval_batch(self.eval_data, EVAL_BATCHES)["loss"])


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()


def _size() -> dict[str, int]:
    """What would grow if a generation left something behind."""
    from torch.distributed import distributed_c10d

    process = psutil.Process()
    return {
        "threads": process.num_threads(),
        "python_threads": threading.active_count(),
        "descriptors": process.num_fds(),
        "groups": len(distributed_c10d._world.pg_map),
        "rss": process.memory_info().rss,
    }


def main(log_dir: Path, options: dict[str, Any]) -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s.%(msecs)03d %(name)s %(message)s", force=True)
    torch.set_num_threads(1)
    worker = ScriptWorker if "loop" in options else Worker
    worker(log_dir, options).train()


def reference(log_dir: Path, options: dict[str, Any]) -> None:
    """The undisturbed run, in a world of one; its ledger is the measure of all others."""
    options = {**options, "pause_s": 0.0, "save_every": 0, "measure": False}
    section = options.get("section", {})
    experts = {**section.get("experts", {}), "slots_per_rank": None}
    options["section"] = {**section, "experts": experts, "elastic": {"enabled": False}}
    private_world()
    main(log_dir, options)
