"""A worker of recovery.py: trains one model with Lazarus or with stock DeepSpeed, and writes down when steps commit.

Every worker appends JSON lines {time, kind, step} to a file of its own in the benchmark's folder.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 1024


class Expert(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)

    def forward(self, rows: Tensor) -> Tensor:
        result: Tensor = self.down(F.gelu(self.up(rows)))
        return result


class Model(nn.Module):
    """Embedding, blocks of dense and MoE layer, classifier; returns its loss."""

    def __init__(self, moe_class: Any, layers: int, hidden: int, experts: int, **options: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, hidden)
        self.dense = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(layers))
        self.moe = nn.ModuleList(moe_class(hidden, Expert(hidden), experts, k=1, **options) for _ in range(layers))
        self.head = nn.Linear(hidden, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        aux = hidden.new_zeros(())
        for dense, moe in zip(self.dense, self.moe, strict=True):
            hidden = hidden + torch.tanh(dense(hidden))
            output, layer_aux, _ = moe(hidden)
            hidden, aux = hidden + output, aux + layer_aux
        logits = self.head(hidden)
        loss = F.cross_entropy(logits.view(-1, VOCABULARY), (tokens * 3 + 1).view(-1) % VOCABULARY)
        return loss + 0.01 * aux


class Worker:
    def __init__(self, folder: Path, options: dict[str, Any]) -> None:
        self.folder, self.options = folder, options
        self.marks = (folder / f"marks-{time.time():.3f}-{os.getpid()}.jsonl").open("a", buffering=1)

    def mark(self, kind: str, step: int) -> None:
        self.marks.write(json.dumps({"time": time.time(), "kind": kind, "step": step}) + "\n")

    def batch(self, step: int, number: int) -> Tensor:
        generator = torch.Generator().manual_seed(100_003 * step + number)
        return torch.randint(0, VOCABULARY, (1, self.options["tokens"]), generator=generator)

    def build(self, moe_class: Any, **options: Any) -> tuple[nn.Module, dict[str, Any]]:
        torch.manual_seed(1)
        sizes = self.options
        model = Model(moe_class, sizes["layers"], sizes["hidden"], sizes["experts"], **options)
        return model, {"train_batch_size": sizes["nodes"], "train_micro_batch_size_per_gpu": 1}

    def lazarus(self) -> None:
        import megatron_lazarus
        from megatron_lazarus.moe.layer import MoELayer

        model, config = self.build(MoELayer)
        config["lazarus"] = {"experts": {"min_replicas": 2}}
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
        engine, *_ = megatron_lazarus.initialize(model=model, optimizer=optimizer, config=config)
        while engine.global_steps < self.options["last_step"]:
            engine.train_batch(lambda step, number: [self.batch(step, number)])
            self.mark("step", engine.global_steps)
        engine.finish()

    def stock(self) -> None:
        import deepspeed
        from deepspeed.moe.layer import MoE
        from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

        # Its compilation would count as recovery, once.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed("gloo", verbose=False)
        nodes, rank = self.options["nodes"], int(os.environ["RANK"])
        model, config = self.build(MoE, ep_size=nodes)
        group = {"params": list(model.parameters()), "name": "parameters"}
        optimizer = torch.optim.Adam(split_params_into_different_moe_groups_for_optimizer(group), lr=1e-4)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        self.mark("ready", 0)
        checkpoint = str(self.folder / "checkpoint")
        if (self.folder / "checkpoint" / "latest").exists():
            engine.load_checkpoint(checkpoint)
        self.mark("loaded", engine.global_steps)
        while engine.global_steps < self.options["last_step"]:
            loss = engine(self.batch(engine.global_steps, rank))
            engine.backward(loss)
            engine.step()
            self.mark("step", engine.global_steps)
            if engine.global_steps % self.options["save_interval"] == 0:
                engine.save_checkpoint(checkpoint)
                self.mark("saved", engine.global_steps)
        torch.distributed.destroy_process_group()


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    torch.set_num_threads(1)
    # DeepSpeed's launcher adds --local_rank.
    kind, folder, options = [argument for argument in sys.argv[1:] if not argument.startswith("--local_rank")]
    worker = Worker(Path(folder), json.loads(options))
    {"lazarus": worker.lazarus, "stock": worker.stock}[kind]()
    return 0


if __name__ == "__main__":
    sys.exit(main())
