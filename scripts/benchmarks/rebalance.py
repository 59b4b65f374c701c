"""Training while the router's favourite expert changes: stock DeepSpeed-MoE, and Lazarus with and without rebalancing.

    python scripts/benchmarks/rebalance.py [--steps 100] [--plot out.png] [--json out.json]

Two processes, one thread and one core each, gloo, float32: a model of two MoE layers. Every step is taken by each
variant in turn, so that all meet the same disturbances. Routing is forced by the input: even at first, then 87 % of the
tokens go to one expert, and in every further phase to another one. The input of a step is made before its time begins.
Prints tokens a second by phase (medians of steps of the slower rank), what looking and moving cost, and, for the
interval of 200 steps, their share of the time.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import sys
import time
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor, nn
from torch.nn import functional as F

WORLD, HIDDEN, FFN, EXPERTS, TOKENS, SLOTS, INTERVAL = 2, 128, 512, 8, 4096, 5, 50
HOT_SHARE = 0.87
# None: even routing. These experts have one replica each in the plan for even loads, like six of the eight.
PHASES: list[int | None] = [None, 1, 4, 2]
LONG_INTERVAL = 200
ADAPTING = 5
"""Steps at the begin of a phase that the row "once adapted" leaves out."""

STOCK, STATIC, QUOTA, BALANCED = "stock, drop off", "lazarus, static", "lazarus, quota", "lazarus, balanced"


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(HIDDEN, FFN)
        self.down = nn.Linear(FFN, HIDDEN)

    def forward(self, rows: Tensor) -> Tensor:
        result: Tensor = self.down(F.gelu(self.up(rows)))
        return result


class Model(nn.Module):
    """Two MoE layers with a residual; ``kind`` is the layer's class, stock or ours."""

    def __init__(self, kind: Any, **options: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind(HIDDEN, Expert(), EXPERTS, k=1, **options) for _ in range(2))
        with torch.no_grad():
            for layer in self.layers:
                gate = layer.deepspeed_moe.gate.wg
                gate.weight.zero_()
                gate.weight[:, :EXPERTS] = torch.eye(EXPERTS)
                gate.weight.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        for layer in self.layers:
            output, _, _ = layer(tokens)
            tokens = tokens + 0.01 * output
        return tokens.square().mean()


def batch(step: int, number: int, hot: int | None) -> Tensor:
    """Input of a micro-batch whose token t carries a strong component along its expert's gate row."""
    generator = torch.Generator().manual_seed(1000 * step + number)
    shares = np.full(EXPERTS, 1 / EXPERTS)
    if hot is not None:
        shares[:] = (1 - HOT_SHARE) / (EXPERTS - 1)
        shares[hot] = HOT_SHARE
    places = (np.arange(TOKENS) + 0.5) / TOKENS
    expert = torch.from_numpy(np.searchsorted(np.cumsum(shares), places).clip(0, EXPERTS - 1))
    values = torch.randn(TOKENS, HIDDEN, generator=generator) * 0.1
    values[torch.arange(TOKENS), expert[torch.randperm(TOKENS, generator=generator)]] += 5.0
    return values


def stock_step() -> Any:
    import deepspeed
    from deepspeed.moe.layer import MoE
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    model = Model(MoE, ep_size=WORLD, drop_tokens=False, use_rts=False)
    groups = split_params_into_different_moe_groups_for_optimizer(
        {"params": [p for p in model.parameters() if p.requires_grad], "name": "all"}
    )
    config = {"train_micro_batch_size_per_gpu": 1, "train_batch_size": WORLD}
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(groups, lr=1e-5), config=config)

    def step(tokens: Tensor) -> None:
        engine.backward(engine(tokens))
        engine.step()

    return step, None


def lazarus_step(interval: int | None, split: str = "quota") -> Any:
    import megatron_lazarus
    from megatron_lazarus.moe.layer import MoELayer

    model = Model(MoELayer, drop_tokens=False)
    experts = {"slots_per_rank": SLOTS, "min_replicas": 1, "rebalance_interval": interval, "split": split}
    config = {"train_micro_batch_size_per_gpu": 1, "train_batch_size": WORLD, "lazarus": {"experts": experts}}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5)
    engine, *_ = megatron_lazarus.initialize(model=model, optimizer=optimizer, config=config)

    def step(tokens: Tensor) -> None:
        # A rank has one micro-batch.
        engine.train_batch(lambda step, number: tokens)

    return step, engine


def worker(rank: int, port: int, steps: int, results: Any) -> None:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(WORLD), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", verbose=False)
    variants = {
        STOCK: stock_step(),
        STATIC: lazarus_step(None),
        QUOTA: lazarus_step(INTERVAL),
        BALANCED: lazarus_step(INTERVAL, "balanced"),
    }
    looks: dict[str, list[dict[str, Any]]] = {name: [] for name in variants}
    for name, (_, engine) in variants.items():
        if engine is not None:
            watch(engine, looks[name])
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(steps * len(PHASES)):
        tokens = batch(number, rank, PHASES[number // steps])
        for name, (step, _) in variants.items():
            seconds[name].append(timed(step, tokens))
    if rank == 0:
        results.put({"steps": steps, "seconds": seconds, "looks": looks})
    dist.barrier()
    dist.destroy_process_group()


def watch(engine: Any, looks: list[dict[str, Any]]) -> None:
    """Note how long each look took, moving included, and whether experts moved."""
    run = engine.rebalancer.run

    def timed_run(step: int) -> None:
        before, start = engine.plan, time.perf_counter()
        run(step)
        looks.append({"step": step, "seconds": time.perf_counter() - start, "moved": engine.plan is not before})

    engine.rebalancer.run = timed_run


def timed(step: Any, tokens: Tensor) -> float:
    """Seconds of a step on the slower rank."""
    dist.barrier()
    start = time.perf_counter()
    step(tokens)
    elapsed = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
    dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
    return float(elapsed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, help="steps of each phase (%(default)s)")
    parser.add_argument("--plot", help="also draw tokens a second over time to this file")
    parser.add_argument("--json", help="also write all numbers to this file")
    arguments = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    results = multiprocessing.get_context("spawn").SimpleQueue()
    multiprocessing.spawn(worker, (port, arguments.steps, results), nprocs=WORLD)
    measured = results.get()
    print_tables(measured)
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(measured, file, indent=1)
    if arguments.plot:
        plot(measured, arguments.plot)
    return 0


def print_tables(measured: dict[str, Any]) -> None:
    steps, seconds, looks = measured["steps"], measured["seconds"], measured["looks"]
    print(
        f"{WORLD} ranks, 2 MoE layers, hidden {HIDDEN}, ffn {FFN}, {EXPERTS} experts, top-1, {TOKENS} tokens a rank "
        f"and step, {SLOTS} slots a rank, a look every {INTERVAL} steps and where loads change, {steps} steps a phase"
    )
    print(f"{'tokens/s':<28}" + "".join(f"{name:>19}" for name in seconds) + f"{'quota/static':>15}{'quota/stock':>13}")
    sums = dict.fromkeys(seconds, 0.0)
    late = dict.fromkeys(seconds, 0.0)
    for index, hot in enumerate(PHASES):
        span = slice(index * steps + (3 if index == 0 else 0), (index + 1) * steps)
        rate = {name: WORLD * TOKENS / statistics.median(times[span]) for name, times in seconds.items()}
        name = "even" if hot is None else f"{HOT_SHARE:.0%} to expert {hot}"
        cells = "".join(f"{rate[variant]:>19.0f}" for variant in rate)
        print(f"{name:<28}{cells}{rate[QUOTA] / rate[STATIC]:>14.2f}x{rate[QUOTA] / rate[STOCK]:>12.2f}x")
        for variant, times in seconds.items():
            if hot is not None:
                sums[variant] += sum(times[span])
                late[variant] += sum(times[index * steps + ADAPTING : (index + 1) * steps])
    for name, total in (("skewed, all steps", sums), ("skewed, once adapted", late)):
        cells = "".join(f"{total[STOCK] / total[variant]:>18.2f}x" for variant in total)
        ratios = f"{total[STATIC] / total[QUOTA]:>14.2f}x{total[STOCK] / total[QUOTA]:>12.2f}x"
        print(f"{name + ', of stock':<28}{cells}{ratios}")
    even = slice(3, steps)
    for variant in (QUOTA, BALANCED):
        overhead = statistics.median(
            ours / static for ours, static in zip(seconds[variant][even], seconds[STATIC][even], strict=True)
        )
        looking = sum(look["seconds"] for look in looks[variant] if look["step"] < steps and not look["moved"])
        share = looking / sum(seconds[variant][even])
        print(
            f"{variant}: on even load a step takes {overhead - 1:+.1%} of static's; looks take {share:.2%} of the time"
        )
    for variant in (QUOTA, BALANCED):
        moved = [look["seconds"] for look in looks[variant] if look["moved"]]
        typical = statistics.median(seconds[variant][steps:])
        if moved:
            share = max(moved) / (max(moved) + LONG_INTERVAL * typical)
            print(
                f"{variant}: {len(moved)} moves in {len(looks[variant])} looks, the slowest took "
                f"{1000 * max(moved):.0f} ms: {share:.2%} of the time if one comes every {LONG_INTERVAL} steps"
            )


def plot(measured: dict[str, Any], path: str) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 4))
    for name, times in measured["seconds"].items():
        axes.plot([WORLD * TOKENS / elapsed for elapsed in times], label=name, linewidth=1)
    for index in range(1, len(PHASES)):
        axes.axvline(index * measured["steps"], color="gray", linestyle=":")
    axes.set_xlabel("step")
    axes.set_ylabel("tokens/s")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    sys.exit(main())
