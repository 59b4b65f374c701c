"""``lazarus plan``: print the plan for token loads, how likely it survives, and what it costs to get there."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    from megatron_lazarus.planning.checks import FloatArray
    from megatron_lazarus.planning.plan import Plan
    from megatron_lazarus.planning.survival import Survival

HELP = "plan expert replicas and their placement for given token loads"
_TOKENS = 1_000_000


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the ``plan`` subcommand."""
    parser = subparsers.add_parser("plan", help=HELP, description=__doc__)
    loads = parser.add_mutually_exclusive_group(required=True)
    loads.add_argument("--loads", type=Path, metavar="FILE", help="tokens: CSV, NPZ or JSON, [layers, experts]")
    loads.add_argument("--zipf", type=float, metavar="S", help="loads in proportion to 1/rank^S instead of a file")
    parser.add_argument("--layers", type=int, default=1, help="layers for --zipf (default 1)")
    parser.add_argument("--experts", type=int, help="experts for --zipf")
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--slots", type=int, required=True, help="slots per node and layer")
    parser.add_argument("--ranks-per-node", type=int, default=1, help="ranks that share a node's slots (default 1)")
    parser.add_argument("--min-replicas", type=int, required=True, help="losses of fewer nodes are always survived")
    parser.add_argument(
        "--max-imbalance", type=float, metavar="X", help="load over the mean beyond which it comes before survival"
    )
    parser.add_argument("--domains", metavar="LABEL,…", help="failure domain of each node")
    parser.add_argument("--weights", metavar="W,…", help="odds to fail of each node")
    parser.add_argument("--current", type=Path, metavar="FILE", help="output of --json to migrate from, same nodes")
    parser.add_argument("--record-bytes", type=int, default=1, help="bytes of one expert's state (default 1: records)")
    parser.add_argument("--samples", type=int, default=20_000, help="for probabilities that cannot be counted")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw the placement and the survival curves")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Plan and print. Bad input is reported on standard error with exit status 2."""
    try:
        report = _report(arguments)
    except (ValueError, OSError) as error:
        print(f"lazarus plan: {error}", file=sys.stderr)
        return 2
    print(json.dumps(report) if arguments.json else _text(report))
    return 0


def _report(arguments: argparse.Namespace) -> dict[str, Any]:
    from megatron_lazarus.planning.baselines import compact_plan, paper_plan, spread_plan
    from megatron_lazarus.planning.checks import integer
    from megatron_lazarus.planning.mapping import map_plan
    from megatron_lazarus.planning.migration import migration
    from megatron_lazarus.planning.planner import balance, make_plan
    from megatron_lazarus.planning.survival import survival_curve

    nodes = integer("--nodes", arguments.nodes, 1)
    ranks = integer("--ranks-per-node", arguments.ranks_per_node, 1)
    slots = integer("--slots", arguments.slots, ranks)
    record_bytes = integer("--record-bytes", arguments.record_bytes, 1)
    loads = _loads(arguments)
    rank_nodes = [node for node in range(nodes) for _ in range(ranks)]
    rank_slots = [slots // ranks + (rank < slots % ranks) for _ in range(nodes) for rank in range(ranks)]
    failures: dict[str, Any] = {
        "domains": None if arguments.domains is None else _per_node(arguments.domains),
        "weights": None if arguments.weights is None else _numbers(arguments.weights),
    }
    most = arguments.max_imbalance
    plan = make_plan(loads, rank_nodes, rank_slots, arguments.min_replicas, max_imbalance=most, **failures)
    moved = None
    if arguments.current is not None:
        current = _read_plan(arguments.current, rank_nodes, rank_slots, loads.shape[1])
        plan = map_plan(current, plan, slots_per_rank=rank_slots, record_bytes=record_bytes, **failures)
        work = migration(current, plan)
        moved = {
            "between_nodes_bytes": work.between_nodes * record_bytes,
            "within_nodes_bytes": (len(work.moves) - work.between_nodes) * record_bytes,
            "missing_records": len(work.missing),
            "staging_bytes_per_rank": int(work.staging.max()) * record_bytes,
        }

    replicas = _replicas(plan)
    curves = {"plan": survival_curve(plan, samples=arguments.samples, **failures)}
    for name, other in (("paper MRO", paper_plan), ("spread", spread_plan), ("compact", compact_plan)):
        curves[name] = survival_curve(other(replicas, nodes, slots), samples=arguments.samples, **failures)
    if arguments.plot is not None:
        _plot(arguments.plot, plan, curves)
    return {
        "nodes": nodes,
        "slots": slots,
        "min_replicas": arguments.min_replicas,
        "layers": [
            {
                "nodes": _by_node(plan, layer),
                "ranks": [list(row) for row in plan.layers[layer].slots],
                "replicas": counts,
                "balance": round(even, 6),
            }
            for layer, (counts, even) in enumerate(zip(replicas.tolist(), balance(plan, loads).tolist(), strict=True))
        ],
        "lost_units": "nodes" if arguments.domains is None else "domains",
        "survival": {name: [_survival_json(point) for point in curve] for name, curve in curves.items()},
        "migration": moved,
        "digest": plan.digest(),
    }


def _loads(arguments: argparse.Namespace) -> FloatArray:
    import numpy as np

    from megatron_lazarus.planning.checks import integer, token_loads

    if arguments.zipf is not None:
        if arguments.experts is None:
            raise ValueError("--zipf needs --experts")
        if not 0 <= arguments.zipf <= 20:
            raise ValueError(f"--zipf is {arguments.zipf}; it must be from 0 to 20")
        shares = 1 / np.arange(1, integer("--experts", arguments.experts, 1) + 1) ** arguments.zipf
        return np.tile(np.floor(_TOKENS * shares / shares.sum()), (integer("--layers", arguments.layers, 1), 1))
    path: Path = arguments.loads
    if path.suffix == ".npz":
        with np.load(path, allow_pickle=False) as file:
            if len(file.files) != 1 and "loads" not in file.files:
                raise ValueError(f"{path} holds {file.files}; it must hold one array, or one named loads")
            table = file["loads" if "loads" in file.files else file.files[0]]
    elif path.suffix == ".json":
        table = np.array(json.loads(path.read_text()), dtype=np.float64)
    elif path.suffix == ".csv":
        table = np.loadtxt(path, delimiter=",", ndmin=2)
    else:
        raise ValueError(f"--loads is {path}; its suffix must be .csv, .npz or .json")
    return token_loads(table, (2,))


def _per_node(text: str) -> dict[int, str]:
    return dict(enumerate(text.split(",")))


def _numbers(text: str) -> dict[int, float]:
    return {node: float(value) for node, value in _per_node(text).items()}


def _read_plan(path: Path, rank_nodes: list[int], rank_slots: list[int], experts: int) -> Plan:
    from megatron_lazarus.planning.plan import Placement, Plan

    layers = json.loads(path.read_text())["layers"]
    placements = []
    for layer in layers:
        rows = layer.get("ranks") if "ranks" in layer else layer["nodes"]
        if len(rows) != len(rank_nodes):
            raise ValueError(f"--current has {len(rows)} ranks; it must have {len(rank_nodes)}, as the new plan")
        placements.append(Placement(experts, tuple(tuple(row) for row in rows)))
    return Plan(tuple(placements), tuple(rank_nodes))


def _replicas(plan: Plan) -> np.ndarray[Any, Any]:
    import numpy as np

    return np.stack([layer.replica_counts().sum(axis=1) for layer in plan.layers])


def _by_node(plan: Plan, layer: int) -> list[list[int]]:
    rows: dict[int, list[int]] = {}
    for node, row in zip(plan.rank_nodes, plan.layers[layer].slots, strict=True):
        rows.setdefault(node, []).extend(row)
    return list(rows.values())


def _survival_json(point: Survival) -> dict[str, Any]:
    return {"probability": point.probability, "low": point.low, "high": point.high, "exact": point.exact}


def _text(report: dict[str, Any]) -> str:
    lines = []
    for index, layer in enumerate(report["layers"]):
        lines.append(f"layer {index}: replicas {' '.join(map(str, layer['replicas']))}")
        lines += [f"  node {node}: {' '.join(map(str, held))}" for node, held in enumerate(layer["nodes"])]
        lines.append(f"  load, largest rank / mean: {layer['balance']:.3f}")
    names = list(report["survival"])
    lines += ["", f"probability that every expert survives, by number of lost {report['lost_units']}"]
    lines.append("lost " + "".join(f"{name:>18}" for name in names))
    for lost in range(len(report["survival"]["plan"])):
        cells = (report["survival"][name][lost] for name in names)
        lines.append(f"{lost:>4} " + "".join(f"{_probability(cell):>18}" for cell in cells))
    if report["migration"] is not None:
        lines.append("")
        lines += [f"{name.replace('_', ' ')}: {value}" for name, value in report["migration"].items()]
    return "\n".join(lines)


def _probability(point: dict[str, Any]) -> str:
    if point["exact"]:
        return f"{point['probability']:.4f}"
    return f"{point['low']:.4f}..{point['high']:.4f}"


def _plot(path: Path, plan: Plan, curves: dict[str, tuple[Survival, ...]]) -> None:
    try:
        import matplotlib
    except ImportError:
        raise ValueError("--plot needs matplotlib, which is not installed") from None
    matplotlib.use("Agg")
    import numpy as np
    from matplotlib import pyplot

    nodes = sorted(set(plan.rank_nodes))
    of_node = np.equal.outer(np.array(plan.rank_nodes), np.array(nodes)).astype(np.int64)
    held = np.concatenate([layer.replica_counts() @ of_node for layer in plan.layers])
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 5), constrained_layout=True)
    image = left.imshow(held, aspect="auto", interpolation="nearest", cmap="viridis")
    left.set(xlabel="node", ylabel="expert, layer after layer", title="replicas")
    figure.colorbar(image, ax=left)
    for name, curve in curves.items():
        # Wide, so that it shows under a curve that coincides with it.
        width = 5 if name == "plan" else 1.5
        right.plot([point.probability for point in curve], marker="o", label=name, linewidth=width)
        right.fill_between(range(len(curve)), [p.low for p in curve], [p.high for p in curve], alpha=0.2)
    right.set(xlabel="lost nodes or domains", ylabel="probability that every expert survives", ylim=(-0.02, 1.02))
    right.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
