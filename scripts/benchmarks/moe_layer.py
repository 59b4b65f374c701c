"""One MoE layer, forward and backward: Lazarus against stock DeepSpeed-MoE, side by side, for skewed routing.

    python scripts/benchmarks/moe_layer.py [--rounds 15] [--json out.json]

Two processes, one thread and one core each, gloo, float32. Every round times each variant once, so that all meet the
same disturbances; the table shows medians over rounds of the slower rank. Routing is forced by the input.
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

WORLD, HIDDEN, FFN, EXPERTS, TOKENS, SLOTS = 2, 256, 1024, 8, 2048, 5
# Tokens of the hot expert for one token of each of the others.
SKEWS = {"1:1": 1.0, "2:1": 2.0, "4:1": 4.0, "8:1": 8.0, "87 % to one": 0.87 / (0.13 / (EXPERTS - 1))}


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(HIDDEN, FFN)
        self.down = nn.Linear(FFN, HIDDEN)

    def forward(self, rows: Tensor) -> Tensor:
        result: Tensor = self.down(F.gelu(self.up(rows)))
        return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", help="also write the table as JSON")
    arguments = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    results = multiprocessing.get_context("spawn").SimpleQueue()
    multiprocessing.spawn(worker, (port, arguments.rounds, results), nprocs=WORLD)
    table = results.get()
    print_table(table)
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(table, file, indent=1)
    return 0


def worker(rank: int, port: int, rounds: int, results: Any) -> None:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(WORLD), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", verbose=False)
    table = []
    for name, skew in SKEWS.items():
        variants = {
            "stock, dropping": stock_layer(rank, drop=True),
            "stock, drop_tokens=False": stock_layer(rank, drop=False),
            "lazarus": lazarus_layer(rank, skew),
        }
        batch = tokens(rank, skew)
        milliseconds: dict[str, list[float]] = {variant: [] for variant in variants}
        dropped = dict.fromkeys(variants, 0.0)
        for turn in range(rounds + 2):
            for variant, layer in variants.items():
                elapsed, lost = timed(layer, batch)
                if turn >= 2:
                    milliseconds[variant].append(elapsed)
                    dropped[variant] = lost
        table.append(
            {
                "routing": name,
                "ms": {variant: statistics.median(times) for variant, times in milliseconds.items()},
                "fastest ms": {variant: min(times) for variant, times in milliseconds.items()},
                "dropped": dropped,
            }
        )
    if rank == 0:
        results.put(table)
    dist.destroy_process_group()


def shares(skew: float) -> np.ndarray:
    weights = np.ones(EXPERTS)
    weights[0] = skew
    return weights / weights.sum()


def tokens(rank: int, skew: float) -> Tensor:
    """Input whose token t carries a strong component along its expert's gate row."""
    generator = torch.Generator().manual_seed(rank)
    counts = np.floor(shares(skew) * TOKENS).astype(int)
    counts[0] += TOKENS - counts.sum()
    expert = torch.from_numpy(np.repeat(np.arange(EXPERTS), counts))[torch.randperm(TOKENS, generator=generator)]
    batch = torch.randn(TOKENS, HIDDEN, generator=generator) * 0.1
    batch[torch.arange(TOKENS), expert] += 5.0
    return batch


def set_gate(gate: nn.Linear) -> None:
    with torch.no_grad():
        gate.weight.zero_()
        gate.weight[:, :EXPERTS] = torch.eye(EXPERTS)


def stock_layer(rank: int, drop: bool) -> nn.Module:
    from deepspeed.moe.layer import MoE

    layer = MoE(HIDDEN, Expert(), EXPERTS, ep_size=WORLD, k=1, drop_tokens=drop, use_rts=False)
    layer.set_deepspeed_parallelism()
    set_gate(layer.deepspeed_moe.gate.wg)
    return layer


def lazarus_layer(rank: int, skew: float) -> nn.Module:
    """The layer as the engine sets it up, with the placement that the planner makes for this load."""
    from megatron_lazarus.moe.communication import Communicator
    from megatron_lazarus.moe.layer import MoELayer
    from megatron_lazarus.moe.records import RecordBuffer
    from megatron_lazarus.planning.planner import make_plan

    layer = MoELayer(HIDDEN, Expert(), EXPERTS, k=1, drop_tokens=False)
    set_gate(layer.gate.wg)
    plan = make_plan(shares(skew)[None, :] * TOKENS * WORLD, range(WORLD), SLOTS, 1)
    placement = plan.layers[0]
    layer.experts.detach()
    names = {name: 0 for _, name, _ in layer.experts.local_parameters()}
    layout = layer.experts.layout(names, ("exp_avg", "exp_avg_sq"))
    buffer = RecordBuffer(layout, placement.slots[rank], torch.device("cpu"))
    for slot, expert in enumerate(buffer.experts):
        buffer.rows[slot] = layer.experts.initial_record(layout, expert, buffer.rows.device).rows[0]
    layer.experts.bind(buffer)
    layer.bind_placement(placement.replica_counts(), rank, np.arange(WORLD), Communicator())
    return layer


def timed(layer: nn.Module, batch: Tensor) -> tuple[float, float]:
    """Milliseconds of one forward and backward on the slower rank, and the share of tokens that reached no expert."""
    inputs = batch.clone().requires_grad_()
    dist.barrier()
    start = time.perf_counter()
    output, aux, _ = layer(inputs)
    (output.square().mean() + 0.01 * aux).backward()
    elapsed = torch.tensor([(time.perf_counter() - start) * 1000], dtype=torch.float64)
    dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
    lost = (output.detach() == 0).all(dim=1).double().mean().reshape(1)
    dist.all_reduce(lost)
    return float(elapsed), float(lost) / WORLD


def print_table(table: list[dict[str, Any]]) -> None:
    variants = list(table[0]["ms"])
    width = max(map(len, variants))
    print(
        f"One MoE layer, {WORLD} ranks, hidden {HIDDEN}, ffn {FFN}, {EXPERTS} experts, top-1, {TOKENS} tokens a rank, "
        f"lazarus with {SLOTS} slots a rank"
    )
    print(f"{'routing':<12} " + " | ".join(f"{variant:>{width}} ms  dropped" for variant in variants), end="")
    print(" | dropless stock / lazarus | lazarus / dropping stock")
    for row in table:
        cells = " | ".join(f"{row['ms'][v]:>{width}.1f} ms {row['dropped'][v]:>7.1%}" for v in variants)
        dropping, dropless, ours = (row["ms"][variant] for variant in variants)
        print(f"{row['routing']:<12} {cells} | {dropless / ours:>23.2f}x | {ours / dropping:>22.2f}x")
    ours = [row["ms"]["lazarus"] for row in table[:4]]
    print(f"lazarus, slowest / fastest from 1:1 to 8:1: {max(ours) / min(ours):.2f}")


if __name__ == "__main__":
    sys.exit(main())
