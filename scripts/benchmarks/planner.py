"""Time to plan: allocation, placement, mapping and migration from the plan of slightly different loads.

    python scripts/benchmarks/planner.py [--largest]

Prints seconds of processor time (one core: set OMP_NUM_THREADS=1) and of wall clock, and what moves.
Loads are Zipf (exponent 1) in a random order per layer, times e^N(0, 0.3); the current plan is for loads that differ by
the same factor again.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from megatron_lazarus.planning.mapping import map_plan
from megatron_lazarus.planning.migration import migration
from megatron_lazarus.planning.planner import make_plan

# name, layers, experts, nodes, ranks per node, slots per rank, wanted seconds
SETTINGS = [
    ("10 nodes, 16 experts", 12, 16, 10, 1, 6, 0.02),
    ("10 nodes, 8 experts (truncated groups)", 12, 8, 10, 1, 6, 0.02),
    ("128 nodes x 8, 256 experts", 60, 256, 128, 8, 4, 1.0),
    ("1,000 nodes, 256 experts", 12, 256, 1000, 1, 8, 3.0),
    ("10,000 nodes, 256 experts", 12, 256, 10_000, 1, 8, 60.0),
]


def measure(layers: int, experts: int, nodes: int, ranks: int, slots: int) -> tuple[list[float], float, int, int]:
    """Processor seconds of planning, mapping and migrating; wall seconds of all; records moved, and between nodes."""
    source = np.random.default_rng(0)
    rank_nodes = [node for node in range(nodes) for _ in range(ranks)]
    zipf = 1e6 / np.arange(1, experts + 1)
    loads = np.array([source.permutation(zipf) for _ in range(layers)])
    loads *= np.exp(source.normal(0, 0.3, loads.shape))
    current = make_plan(loads * np.exp(source.normal(0, 0.3, loads.shape)), rank_nodes, slots, 2)
    wall = time.perf_counter()
    marks = [time.process_time()]
    plan = make_plan(loads, rank_nodes, slots, 2)
    marks.append(time.process_time())
    plan = map_plan(current, plan)
    marks.append(time.process_time())
    work = migration(current, plan)
    marks.append(time.process_time())
    return np.diff(marks).tolist(), time.perf_counter() - wall, len(work.moves), work.between_nodes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--largest", action="store_true", help="also 10,000 nodes (3 GB of memory)")
    arguments = parser.parse_args()
    measure(*SETTINGS[0][1:6])  # warm up: imports and tables
    print(f"{'setting':40} {'plan':>8} {'map':>8} {'migrate':>8} {'total':>8} {'wanted':>7} {'wall':>8}  moved (nodes)")
    for name, *sizes, wanted in SETTINGS if arguments.largest else SETTINGS[:-1]:
        seconds, wall, moved, between = measure(*sizes)
        cells = "".join(f" {second:8.3f}" for second in (*seconds, sum(seconds)))
        print(f"{name:40}{cells} {wanted:7.2f} {wall:8.3f}  {moved} ({between})", flush=True)


if __name__ == "__main__":
    main()
