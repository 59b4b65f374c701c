"""Which token goes to which replica, decided alike on every rank, and the uneven all-to-all that takes it there.

The split follows Lazarus' Algorithm 1 (arXiv 2407.04656, section 4.2) in integers: every replica of an expert gets an
equal quota of its tokens, or what another rule gives it, and a token stays on its own rank, or at least its own node,
where quotas allow.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from megatron_lazarus.moe.communication import Communicator

IntArray = npt.NDArray[np.int64]

Quotas = Callable[[IntArray, IntArray], IntArray]
"""(tokens [experts], replicas [experts, ranks]) -> tokens that each rank takes of each expert [experts, ranks]."""


def replica_quotas(tokens: IntArray, replicas: IntArray) -> IntArray:
    """Tokens each rank's replicas take of each expert, shape [experts, ranks].

    ``tokens`` [experts] are all tokens of an expert, ``replicas`` [experts, ranks] its replicas. An equal share each;
    the remainder, less than one token a replica, goes to consecutive replicas that start elsewhere for each expert, so
    that no rank collects them all.
    """
    total = replicas.sum(axis=1)
    base, remainder = np.divmod(tokens, np.maximum(total, 1))
    first = np.cumsum(remainder) - remainder
    begin = np.cumsum(replicas, axis=1) - replicas
    # Replica numbers begin..begin+replicas-1 of the expert; those in the cyclic window of length `remainder`
    # that starts at `first` get one token more. A window that wraps is two intervals.
    start = np.mod(first, np.maximum(total, 1))[:, None]
    stop = start + remainder[:, None]
    end = begin + replicas
    extra = np.clip(np.minimum(end, stop) - np.maximum(begin, start), 0, None)
    wrapped = np.clip(np.minimum(end, stop - total[:, None]) - begin, 0, None)
    return base[:, None] * replicas + extra + wrapped


def _matched(supply: IntArray, demand: IntArray, segment: IntArray) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Lay supply and demand [experts, ranks] out as intervals, side by side within each segment of ranks.

    ``segment`` [ranks] is non-decreasing. Returns the intervals' starts in the line of supplies and the line of
    demands, both offset so that different segments never overlap, and the amounts matched of each.
    """
    first = np.searchsorted(segment, segment, side="left")
    last = np.searchsorted(segment, segment, side="right") - 1

    def starts_and_totals(amount: IntArray) -> tuple[IntArray, IntArray]:
        cumulative = np.cumsum(amount, axis=1)
        before = cumulative - amount
        return before - before[:, first], cumulative[:, last] - before[:, first]

    supply_start, supply_total = starts_and_totals(supply)
    demand_start, demand_total = starts_and_totals(demand)
    both = np.minimum(supply_total, demand_total)
    supply_matched = np.clip(both - supply_start, 0, supply)
    demand_matched = np.clip(both - demand_start, 0, demand)
    return supply_start, demand_start, supply_matched, demand_matched


def _overlap(start: IntArray, length: IntArray, starts: IntArray, lengths: IntArray) -> IntArray:
    """Overlap of one interval per expert, [experts, 1], with one per expert and rank, [experts, ranks]."""
    return np.clip(np.minimum(start + length, starts + lengths) - np.maximum(start, starts), 0, None)


@dataclass(frozen=True)
class DispatchPlan:
    """What one rank exchanges: ``send[j, e]`` tokens of expert e go to rank j, ``receive[i, e]`` come from rank i."""

    send: IntArray
    receive: IntArray


def plan_dispatch(
    tokens: IntArray, replicas: IntArray, rank: int, rank_nodes: IntArray, quotas: Quotas = replica_quotas
) -> DispatchPlan:
    """Split the tokens of all ranks over the replicas and return ``rank``'s part of it.

    ``tokens`` [experts, ranks] counts what each rank routed to each expert, ``replicas`` [experts, ranks] its
    replicas, ``rank_nodes`` [ranks] each rank's node. Every rank computes the same split from the same counts.
    ``quotas`` is the rule by which replicas share an expert's tokens.
    Sum over ranks j of ``send[j, e]`` is ``tokens[e, rank]``; sum over i of ``receive[i, e]`` is the quota of this
    rank's replicas; by the default rule these differ by at most one token between two replicas of an expert.
    """
    experts, world = tokens.shape
    quota = quotas(tokens.sum(axis=1), replicas)
    local = np.minimum(tokens, quota)
    supply, demand = tokens - local, quota - local
    send = np.zeros((experts, world), dtype=np.int64)
    receive = np.zeros((experts, world), dtype=np.int64)
    send[:, rank] = receive[:, rank] = local[:, rank]
    if world > 1:
        order = np.argsort(rank_nodes, kind="stable")
        position = int(np.flatnonzero(order == rank)[0])
        supply, demand = supply[:, order], demand[:, order]
        for segment in (rank_nodes[order], np.zeros(world, dtype=np.int64)):
            supply_start, demand_start, supplied, demanded = _matched(supply, demand, segment)
            here = (segment == segment[position])[None, :]
            mine = slice(position, position + 1)
            send[:, order] += _overlap(supply_start[:, mine], supplied[:, mine], demand_start, demanded) * here
            receive[:, order] += _overlap(demand_start[:, mine], demanded[:, mine], supply_start, supplied) * here
            supply, demand = supply - supplied, demand - demanded
    return DispatchPlan(send=np.ascontiguousarray(send.T), receive=np.ascontiguousarray(receive.T))


def piece_order(lengths: IntArray) -> IntArray:
    """Row numbers that turn pieces stored by (row, column) of ``lengths`` into pieces by (column, row)."""
    flat = lengths.reshape(-1)
    starts = (np.cumsum(flat) - flat).reshape(lengths.shape).T.reshape(-1)
    counts = lengths.T.reshape(-1)
    return np.repeat(starts - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, send: list[int], receive: list[int], peers: Communicator) -> torch.Tensor:
        ctx.send, ctx.receive, ctx.peers = send, receive, peers
        return peers.all_to_all(rows, send, receive)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return ctx.peers.all_to_all(gradients[0], ctx.receive, ctx.send), None, None, None


class _GatherRoutes(torch.autograd.Function):
    """Row ``route // k`` for each of the distinct routes; the backward adds a token's routes in their fixed order."""

    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, routes: torch.Tensor, k: int) -> torch.Tensor:
        ctx.save_for_backward(routes)
        ctx.k, ctx.shape = k, tokens.shape
        return tokens.index_select(0, routes if k == 1 else routes // k)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (routes,) = ctx.saved_tensors
        count, width = ctx.shape
        spread = gradients[0].new_zeros(count * ctx.k, width).index_copy_(0, routes, gradients[0])
        return (spread if ctx.k == 1 else spread.view(count, ctx.k, width).sum(1)), None, None


class Dispatch:
    """One forward's exchange: ``scatter`` takes tokens to their experts, ``gather`` brings the results back.

    ``routes_by_expert`` are the kept routes (token * k + choice) ordered by expert, on the tokens' device.
    """

    def __init__(self, plan: DispatchPlan, routes_by_expert: torch.Tensor, k: int, peers: Communicator) -> None:
        device = routes_by_expert.device
        self.k, self.peers = k, peers
        self.exchanges = plan.send.shape[0] > 1
        self.send_splits: list[int] = plan.send.sum(axis=1).tolist()
        self.receive_splits: list[int] = plan.receive.sum(axis=1).tolist()
        self.tokens_per_expert: list[int] = plan.receive.sum(axis=0).tolist()
        if not self.exchanges:
            self.routes = routes_by_expert
            return
        # Routes lie by (expert, destination); they travel by (destination, expert), and arrive by (source, expert).
        self.routes = routes_by_expert[torch.from_numpy(piece_order(plan.send.T)).to(device)]
        to_experts = piece_order(plan.receive)
        self.to_experts = torch.from_numpy(to_experts).to(device)
        back = np.empty_like(to_experts)
        back[to_experts] = np.arange(len(to_experts))
        self.from_experts = torch.from_numpy(back).to(device)

    def scatter(self, tokens: torch.Tensor) -> torch.Tensor:
        """Tokens [T, H] of this rank to rows [sum(tokens_per_expert), H] ordered by expert."""
        rows: torch.Tensor = _GatherRoutes.apply(tokens, self.routes, self.k)
        if not self.exchanges:
            return rows
        received: torch.Tensor = _AllToAll.apply(rows, self.send_splits, self.receive_splits, self.peers)
        return received.index_select(0, self.to_experts)

    def gather(self, rows: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Expert outputs, ordered as ``scatter`` gave them, back to [T, k, H]; routes that were dropped are zero."""
        if self.exchanges:
            rows = rows.index_select(0, self.from_experts)
            rows = _AllToAll.apply(rows, self.receive_splits, self.send_splits, self.peers)
        spread = rows.new_zeros(num_tokens * self.k, rows.shape[1]).index_copy(0, self.routes, rows)
        return spread.view(num_tokens, self.k, rows.shape[1])
