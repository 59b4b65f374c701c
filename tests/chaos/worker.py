"""A member of an elastic run: trains ``TinyMoE`` and writes down what it did, for the test to compare.

Every line of ``<log dir>/ledger-<pid>.jsonl`` is flushed before the step goes on: ``sample`` when a micro-batch's loss got a
gradient, ``step`` when the step was committed here.
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from tests.distributed.runs import Run, build
from tests.distributed.tiny import batch


class Worker:
    def __init__(self, log_dir: Path, options: dict[str, Any]) -> None:
        self.steps = options.pop("total_steps")
        self.pause = options.pop("pause_s", 0.0)
        self.save_every = options.pop("save_every", 0)
        self.fault = os.environ.get("CHAOS_FAULT", "")
        self.log_dir = log_dir
        self.run_options = Run(**options)
        self.ledger = (log_dir / f"ledger-{os.getpid()}.jsonl").open("a")
        self.engine, self.samples = build(0, 1, self.run_options)
        self.inject()

    @property
    def generation(self) -> int:
        return self.engine._elastic.membership.generation.number

    def write(self, kind: str, **fields: Any) -> None:
        self.ledger.write(json.dumps({"kind": kind, "generation": self.generation, **fields}) + "\n")
        self.ledger.flush()

    def data(self, step: int, number: int) -> dict[str, torch.Tensor]:
        self.samples._current = (step, number)
        if self.pause:
            time.sleep(self.pause)
        if self.fault == f"raise:{step}":
            raise ValueError("a bad batch")
        return batch(step, number)

    def train(self) -> None:
        engine = self.engine
        while engine.global_steps < self.steps:
            result = engine.train_batch(self.data)
            self.write("step", step=result.step, loss=result.loss, norm=result.grad_norm, rank=engine.rank)
            if self.save_every and engine.global_steps % self.save_every == 0:
                engine.save_checkpoint(str(self.log_dir / "checkpoint"))
        losses = engine.eval_batch(self.data, 5)
        dense = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in engine.module.parameters())).hexdigest()
        records = [
            [layer, expert, hashlib.sha256(buffer.rows[slot].numpy().tobytes()).hexdigest()]
            for layer, buffer in enumerate(engine.experts.buffers)
            for slot, expert in enumerate(buffer.experts)
        ]
        self.write("end", rank=engine.rank, world=engine.world_size, dense=dense, records=records, eval=losses["loss"])
        engine.finish()

    def inject(self) -> None:
        """SIGKILL of this process at a named point: ``point:step``, or a stop there: ``stop-point:step``."""
        samples = self.samples
        record = samples.samples

        class Recorder(list):
            def append(inner, sample: tuple[int, int]) -> None:
                self.write("sample", step=sample[0], number=sample[1])

        assert record == []
        samples.samples = Recorder()
        if not self.fault or self.fault.startswith("raise"):
            return
        point, _, step = self.fault.partition(":")
        engine = self.engine
        places = {
            "before-backward": (engine, "_backward"),
            "before-reduce": (engine.experts, "reduce_gradients"),
            "before-vote": (engine.protocol, "_vote"),
            "after-vote": (engine.protocol, "decide"),
            "before-experts-step": (engine.experts, "commit"),
            "before-dense-step": (engine.deepspeed_engine, "step"),
            "after-step": (engine.experts, "clear_step"),
            "migration": (engine.experts, "change_plan"),
            "evaluation": (engine, "_evaluate"),
            "saving": (engine._checkpoint, "_write_expert"),
            "finish": (engine, "finish"),
        }
        kind = signal.SIGKILL
        if point.startswith("stop-"):
            point, kind = point.removeprefix("stop-"), signal.SIGSTOP
        owner, name = places[point]
        original = getattr(owner, name)

        def wrapped(*arguments: Any, **options: Any) -> Any:
            if engine.global_steps >= int(step):
                print(f"fault {self.fault} at step {engine.global_steps}", flush=True)
                os.kill(os.getpid(), kind)
            return original(*arguments, **options)

        setattr(owner, name, wrapped)


if __name__ == "__main__":
    faulthandler.enable()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s.%(msecs)03d %(name)s %(message)s")
    torch.set_num_threads(1)
    Worker(Path(sys.argv[1]), json.loads(sys.argv[2])).train()
