"""What stale experts cost in quality: a small GPT on real text, with and without faults, in pairs of equal seeds.

    python scripts/benchmarks/checkpoint_quality.py [--seeds 5] [--jobs 2]

A save every --interval steps writes K = 1 of 8 experts a layer. A fault ends in the last rung of the recovery ladder:
everything is loaded from the newest checkpoint, whose experts are of different ages, and the steps since are redone.
Six faults, spread over the run, lose just under 3.75 % of the run's token updates of experts (PLT), as the run's own
ledger counts them. Whatever they cost must be less than what the seed alone makes of the validation loss: exits with 1
if the mean difference exceeds the seeds' standard deviation, or PLT is not where it should be.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

LIMIT = 0.0375
MICRO_BATCH, MICRO_BATCHES, LENGTH, EVALUATED = 4, 2, 64, 100
CONTENTS = (None, "all", "moments")
"""Of the checkpoints that faults fall back on; None: no faults."""


@dataclass(frozen=True)
class Run:
    seed: int
    content: str | None
    steps: int
    interval: int
    faults: int


@dataclass(frozen=True)
class Result:
    """Validation loss in nats per byte; ``plt`` of the planned run, by the ledger; steps that were done twice."""

    run: Run
    loss: float
    plt: float
    redone: int


class Text:
    """Windows of a text: random ones to train on, fixed ones of its last twentieth to judge by."""

    def __init__(self, path: str, seed: int) -> None:
        data = np.fromfile(path, dtype=np.uint8)
        border = len(data) * 19 // 20
        self._train, self._valid, self._seed = data[:border], data[border:], seed

    def train(self, step: int, number: int) -> dict[str, torch.Tensor]:
        source = np.random.default_rng((self._seed, step, number))
        return self._batch(self._train, source.integers(0, len(self._train) - LENGTH - 1, MICRO_BATCH))

    def valid(self, step: int, number: int) -> dict[str, torch.Tensor]:
        starts = np.linspace(0, len(self._valid) - LENGTH - 2, EVALUATED * MICRO_BATCH, dtype=np.int64)
        return self._batch(self._valid, starts[number * MICRO_BATCH : (number + 1) * MICRO_BATCH])

    @staticmethod
    def _batch(data: np.ndarray[Any, Any], starts: np.ndarray[Any, Any]) -> dict[str, torch.Tensor]:
        windows = torch.from_numpy(np.stack([data[start : start + LENGTH + 1] for start in starts]).astype(np.int64))
        ones = torch.ones(len(starts), LENGTH)
        return {"tokens": windows[:, :-1], "labels": windows[:, 1:], "loss_mask": ones}


def train(run: Run, text_path: str) -> Result:
    torch.set_num_threads(1)
    logging.getLogger("megatron_lazarus").setLevel(logging.ERROR)
    import deepspeed

    import megatron_lazarus
    from megatron_lazarus.joining import private_world
    from megatron_lazarus.models.gpt import GPTConfig, PretrainGPT

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    private_world()
    text = Text(text_path, run.seed)
    model = PretrainGPT(
        GPTConfig(
            vocab_size=256,
            num_layers=2,
            hidden_size=64,
            num_attention_heads=2,
            seq_length=LENGTH,
            max_position_embeddings=LENGTH,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            seed=run.seed,
            num_experts=8,
            moe_drop_tokens=False,
            moe_loss_coeff=0.01,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    # A fixed K: what is asked here is what a given proportion of lost tokens costs.
    checkpoint = {"persist_experts": 1, "content": run.content or "all", "dynamic_k": False, "keep_last": 1}
    engine, *_ = megatron_lazarus.initialize(
        model=model,
        optimizer=optimizer,
        seed=run.seed,
        config={
            "train_batch_size": MICRO_BATCH * MICRO_BATCHES,
            "train_micro_batch_size_per_gpu": MICRO_BATCH,
            "steps_per_print": 2**31 - 1,
            "lazarus": {"checkpoint": checkpoint},
        },
    )
    engine.ledger.planned_steps = run.steps
    # Just before a save, when most steps are redone.
    pending = [
        run.steps * (index + 1) // (run.faults + 1) // run.interval * run.interval + run.interval - 1
        for index in range(run.faults if run.content else 0)
    ]
    redone = 0
    with tempfile.TemporaryDirectory(prefix="lazarus-quality-") as folder:
        while engine.global_steps < run.steps:
            if run.content and engine.global_steps % run.interval == 0 and engine.global_steps:
                engine.save_checkpoint(folder, wait=True)
            engine.train_batch(text.train)
            if pending and engine.global_steps == pending[0]:
                reached = pending.pop(0)
                engine.load_checkpoint(folder)
                redone += reached - engine.global_steps
        loss = engine.eval_batch(text.valid, EVALUATED)["lm loss"]
        plt = engine.ledger.plt()
        engine.finish()
    torch.distributed.destroy_process_group()
    return Result(run, loss, plt, redone)


def prepare_text(folder: Path) -> str:
    """All passages of the quickstart's text in one file; says where it came from."""
    from megatron_lazarus.models.text import fetch_text

    lines = folder / "text.jsonl"
    print(fetch_text(lines))
    path = folder / "text.bin"
    with lines.open(encoding="utf-8") as file:
        path.write_bytes(b"\n\n".join(json.loads(line)["text"].encode() for line in file))
    return str(path)


def report(results: list[Result]) -> bool:
    """Print the table; whether everything is as it should be."""
    by_run = {(result.run.seed, result.run.content): result for result in results}
    seeds = sorted({seed for seed, _ in by_run})
    base = [by_run[seed, None].loss for seed in seeds]
    print(f"{'seed':>6}{'no fault':>11}" + "".join(f"{content!r:>11}{'PLT':>8}" for content in CONTENTS if content))
    for seed in seeds:
        cells = "".join(
            f"{by_run[seed, content].loss:>11.4f}{by_run[seed, content].plt:>8.2%}" for content in CONTENTS if content
        )
        print(f"{seed:>6}{by_run[seed, None].loss:>11.4f}{cells}")
    deviation, good = statistics.stdev(base), True
    print(f"no fault: mean {statistics.mean(base):.4f}, standard deviation of the seeds {deviation:.4f}")
    for content in (content for content in CONTENTS if content):
        differences = [by_run[seed, content].loss - by_run[seed, None].loss for seed in seeds]
        mean, error = statistics.mean(differences), statistics.stdev(differences) / len(differences) ** 0.5
        shares = [by_run[seed, content].plt for seed in seeds]
        good &= mean < deviation and all(0.9 * LIMIT < share <= LIMIT for share in shares)
        print(
            f"faults, content {content!r}: mean difference {mean:+.4f} (standard error {error:.4f}), "
            f"{'below' if mean < deviation else 'NOT below'} the seeds' standard deviation"
        )
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1170)
    parser.add_argument("--interval", type=int, default=2, help="steps between saves (%(default)s)")
    parser.add_argument("--faults", type=int, default=6)
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time (%(default)s)")
    arguments = parser.parse_args()
    if arguments.seeds < 2:
        parser.error("--seeds must be at least 2")
    runs = [
        Run(1000 + seed, content, arguments.steps, arguments.interval, arguments.faults)
        for seed in range(arguments.seeds)
        for content in CONTENTS
    ]
    with tempfile.TemporaryDirectory(prefix="lazarus-text-") as folder:
        text = prepare_text(Path(folder))
        with multiprocessing.get_context("spawn").Pool(arguments.jobs, maxtasksperchild=1) as pool:
            results = pool.starmap(train, [(run, text) for run in runs], chunksize=1)
    first = runs[0]
    print(
        f"GPT, 2 layers, hidden 64, 8 experts top-1 in one layer, {first.steps} steps of "
        f"{MICRO_BATCH * MICRO_BATCHES * LENGTH} bytes; a save of K = 1 every {first.interval} steps, "
        f"{first.faults} faults; validation loss in nats per byte"
    )
    return 0 if report(results) else 1


if __name__ == "__main__":
    sys.exit(main())
