"""Which node takes which part of a new plan, so that the fewest bytes cross the network."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence

import numpy as np
from scipy.optimize import linear_sum_assignment
from scipy.sparse import coo_array, csr_array

from megatron_lazarus.planning.checks import FloatArray, IntArray, by_node, integer, node_weights, slot_counts
from megatron_lazarus.planning.plan import Placement, Plan, replica_table

_ROWS_AT_ONCE = 1000


def map_plan(
    current: Plan,
    plan: Plan,
    *,
    previous_ranks: Sequence[int | None] | None = None,
    slots_per_rank: int | Sequence[int] = 1,
    domains: Mapping[int, Hashable] | None = None,
    weights: Mapping[int, float] | None = None,
    record_bytes: int | Sequence[int] = 1,
) -> Plan:
    """``plan`` with its nodes exchanged so that the fewest bytes move between nodes from the state of ``current``.

    One mapping of nodes for all layers: layers that lean on the same nodes keep doing so, and the probability of
    survival does not change. The mapping is an optimal assignment (the paper, arXiv 2407.04656 section 4.3, is greedy).
    Then ranks are exchanged within each node, so that the fewest records move between its ranks, and what a rank
    retains stays in its slot.

    ``previous_ranks[rank]`` is the rank in ``current`` whose state the rank of ``plan`` has, None for a new one;
    default: the same rank. Only alike nodes are exchanged: same ``slots_per_rank`` (only equality counts), same
    ``weights``; with ``domains``, alike domains as a whole and nodes within them. All three are ``make_plan``'s.
    ``record_bytes`` is the size of a record, one number or one for each layer.
    Raises ValueError if the two plans have different numbers of layers or experts, or ranks or nodes do not fit.
    """
    previous = previous_of(current, plan, previous_ranks)
    sizes = slot_counts("record_bytes", record_bytes, len(plan.layers), "layer")
    slots = slot_counts("slots_per_rank", slots_per_rank, plan.world_size, "rank")
    nodes, node_of = np.unique(plan.rank_nodes, return_inverse=True)
    odds = None if weights is None else node_weights("weights", by_node("weights", weights, nodes.tolist()))
    labels: Sequence[Hashable] = [0] * len(nodes)
    if domains is not None:
        labels = by_node("domains", domains, nodes.tolist())
    ranks = [np.flatnonzero(node_of == node) for node in range(len(nodes))]
    kinds = [
        (tuple(sorted(slots[members].tolist())), None if odds is None else float(odds[node]))
        for node, members in enumerate(ranks)
    ]

    has = _records(current, previous, np.ones_like(sizes)) > 0
    wants = _records(plan, list(range(plan.world_size)), sizes)
    together = csr_array((np.ones(len(node_of)), (node_of, np.arange(len(node_of)))))
    kept = _product(((together @ has) > 0).astype(np.float64), together @ wants)
    source = np.arange(plan.world_size)
    for node, part in enumerate(_assign_in_domains(kept, kinds, labels)):
        here, there = ranks[node], ranks[part]
        if len(here) == 1:
            source[here] = there
        else:
            kept_here = _product(has[here].astype(np.float64), wants[there])
            source[here] = there[_assign(kept_here, slots[here].tolist(), slots[there].tolist())]
    return Plan(
        tuple(
            _renamed(layer, source, before, previous) for layer, before in zip(plan.layers, current.layers, strict=True)
        ),
        plan.rank_nodes,
    )


def previous_of(current: Plan, plan: Plan, previous_ranks: Sequence[int | None] | None) -> list[int | None]:
    """The rank in ``current`` of each rank of ``plan``. Raises ValueError if the two plans cannot follow each other."""
    shapes = [[layer.num_experts for layer in one.layers] for one in (current, plan)]
    if shapes[0] != shapes[1]:
        raise ValueError(f"plan has layers of {shapes[1]} experts; it must have those of current: {shapes[0]}")
    if previous_ranks is None:
        if current.world_size != plan.world_size:
            raise ValueError(
                f"previous_ranks is None; it must say which of current's {current.world_size} ranks became which of "
                f"plan's {plan.world_size}"
            )
        return list(range(plan.world_size))
    if len(previous_ranks) != plan.world_size:
        raise ValueError(f"previous_ranks has {len(previous_ranks)} entries; it must have {plan.world_size}")
    result: list[int | None] = [
        None if old is None else integer(f"previous_ranks[{rank}]", old, 0, current.world_size - 1)
        for rank, old in enumerate(previous_ranks)
    ]
    if len(set(result) - {None}) != sum(old is not None for old in result):
        raise ValueError(f"previous_ranks is {result}; each of current's ranks can be at most one of plan's")
    return result


def _records(plan: Plan, ranks: Sequence[int | None], sizes: IntArray) -> csr_array:
    """Bytes of each record on each of ``ranks``, shape [ranks, experts of all layers]."""
    offset = 0
    parts: list[tuple[IntArray, IntArray, FloatArray]] = []
    for layer, size in zip(plan.layers, sizes.tolist(), strict=True):
        held = replica_table([() if rank is None else layer.slots[rank] for rank in ranks])
        parts.append((held[:, 0], held[:, 2] + offset, np.full(len(held), float(size))))
        offset += layer.num_experts
    rows, columns, values = (np.concatenate(column) for column in zip(*parts, strict=True))
    return coo_array((values, (rows, columns)), (len(ranks), offset)).tocsr()


def _product(has: csr_array, wants: csr_array) -> FloatArray:
    """Bytes wanted by each row of ``wants`` that each row of ``has`` has, shape [rows of has, rows of wants]."""
    transposed = wants.T.tocsr()
    result = np.empty((has.shape[0], wants.shape[0]))
    for start in range(0, len(result), _ROWS_AT_ONCE):
        result[start : start + _ROWS_AT_ONCE] = (has[start : start + _ROWS_AT_ONCE] @ transposed).toarray()
    return result


def _assign(gain: FloatArray, row_kinds: Sequence[Hashable], column_kinds: Sequence[Hashable]) -> IntArray:
    """The column of each row: a one-to-one assignment within equal kinds, of the largest total gain."""
    columns = np.empty(len(gain), dtype=np.int64)
    by_kind: dict[Hashable, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    for side, kinds in enumerate((row_kinds, column_kinds)):
        for index, kind in enumerate(kinds):
            by_kind[kind][side].append(index)
    for rows, candidates in by_kind.values():
        block = gain if len(rows) == len(gain) else gain[np.ix_(rows, candidates)]
        chosen = linear_sum_assignment(block, maximize=True)[1]
        columns[rows] = np.array(candidates)[chosen]
    return columns


def _assign_in_domains(gain: FloatArray, kinds: Sequence[Hashable], labels: Sequence[Hashable]) -> list[int]:
    """The part of the plan that each node takes: domains go to alike domains, in them nodes to alike nodes."""
    members: dict[Hashable, list[int]] = defaultdict(list)
    for node, label in enumerate(labels):
        members[label].append(node)
    domains = list(members.values())
    if len(domains) == 1:
        return _assign(gain, kinds, kinds).tolist()
    shapes = [tuple(sorted(map(repr, (kinds[node] for node in domain)))) for domain in domains]
    inner: dict[tuple[int, int], IntArray] = {}
    total = np.zeros((len(domains), len(domains)))
    for here, nodes in enumerate(domains):
        for there, parts in enumerate(domains):
            if shapes[here] == shapes[there]:
                block = gain[np.ix_(nodes, parts)]
                chosen = _assign(block, [kinds[node] for node in nodes], [kinds[part] for part in parts])
                inner[here, there] = np.array(parts)[chosen]
                total[here, there] = block[np.arange(len(nodes)), chosen].sum()
    result = [0] * len(kinds)
    for here, there in enumerate(_assign(total, shapes, shapes).tolist()):
        for node, part in zip(domains[here], inner[here, there].tolist(), strict=True):
            result[node] = part
    return result


def _renamed(layer: Placement, source: IntArray, before: Placement, previous: Sequence[int | None]) -> Placement:
    """``layer`` with each rank taking the row of its ``source``, in the order that retains most slots."""
    rows = []
    for part, old in zip(source.tolist(), previous, strict=True):
        row = layer.slots[part]
        rows.append(row if old is None or before.slots[old] == row else _in_place(row, before.slots[old]))
    return Placement(layer.num_experts, tuple(rows))


def _in_place(row: tuple[int, ...], old: tuple[int, ...]) -> tuple[int, ...]:
    """``row`` reordered so that experts which ``old`` had stay in their slots."""
    arrivals = list(row)
    result: list[int | None] = [None] * len(row)
    for slot, expert in enumerate(old[: len(row)]):
        if expert in arrivals:
            arrivals.remove(expert)
            result[slot] = expert
    rest = iter(arrivals)
    return tuple(next(rest) if expert is None else expert for expert in result)
