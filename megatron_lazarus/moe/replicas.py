"""Sum the gradients of an expert's replicas, so that every replica takes the same step.

Replica sets are arbitrary subsets of ranks. There is no process group per expert: two uneven exchanges over the world
do a reduce-scatter and an all-gather for all experts of a bucket at once, each holder summing one part of the
gradient in rank order. Every holder receives the same bytes, so replicas stay bitwise equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatron_lazarus.moe.communication import Communicator
from megatron_lazarus.moe.records import RecordBuffer

Backend = Literal["all_to_all", "point_to_point"]
_BUCKET_BYTES = 64 * 2**20


def exchange(
    rows: Tensor, send: list[int], receive: list[int], peers: Communicator, rank: int, backend: Backend
) -> Tensor:
    """Send ``send[j]`` elements of flat ``rows`` to each rank j; returns what came, ``receive[i]`` from each rank i."""
    if backend == "all_to_all":
        return peers.all_to_all(rows, send, receive)
    out = rows.new_empty(sum(receive))
    outgoing, incoming = rows.split(send), out.split(receive)
    incoming[rank].copy_(outgoing[rank])
    others = [peer for peer in range(len(send)) if peer != rank]
    peers.point_to_point(
        [(outgoing[peer], peer, 0) for peer in others if send[peer]],
        [(incoming[peer], peer, 0) for peer in others if receive[peer]],
    )
    return out


@dataclass(frozen=True)
class _Shared:
    """An expert that several ranks hold: the flat gradient of its computing slot here, and its holders."""

    gradient: Tensor
    holders: tuple[int, ...]

    def part(self, holder: int) -> tuple[int, int]:
        """The range of elements that ``holder`` sums."""
        index, count, n = self.holders.index(holder), len(self.holders), self.gradient.numel()
        return n * index // count, n * (index + 1) // count


class ReplicaGradients:
    """The exchange for one set of placements; rebuilt when placements change.

    ``buffers[layer]`` are this rank's records, ``holders[layer][expert]`` the ranks that hold the expert.
    Sums are made in float32 for narrower types and rounded once.
    """

    def __init__(
        self,
        buffers: Sequence[RecordBuffer],
        holders: Sequence[Sequence[tuple[int, ...]]],
        rank: int,
        world_size: int,
        peers: Communicator,
        backend: Backend = "all_to_all",
        bucket_bytes: int = _BUCKET_BYTES,
    ) -> None:
        self._rank, self._world_size, self._peers, self._backend = rank, world_size, peers, backend
        self._dtype_source = buffers[0].gradients if buffers else torch.empty(0)
        self._mirrors = [
            (buffer.gradients[slot], buffer.gradients[first[expert]])
            for buffer in buffers
            for first in (buffer.first_slots(),)
            for slot, expert in enumerate(buffer.experts)
            if slot != first[expert]
        ]
        self._buckets: list[list[_Shared]] = []
        size = 0
        for buffer, layer_holders in zip(buffers, holders, strict=True):
            slots = buffer.first_slots()
            # Every rank cuts the buckets at the same layers, whatever it holds itself.
            layer_bytes = buffer.layout.numel * buffer.gradients.element_size() * len(layer_holders)
            if not self._buckets or size + layer_bytes > bucket_bytes:
                self._buckets.append([])
                size = 0
            size += layer_bytes
            for expert, ranks in enumerate(layer_holders):
                if rank in ranks and len(ranks) > 1:
                    self._buckets[-1].append(_Shared(buffer.gradients[slots[expert]], ranks))
        self._any_shared = any(len(ranks) > 1 for layer in holders for ranks in layer)

    def reduce(self) -> None:
        """Replace every replica's gradient by the sum over all replicas of its expert."""
        if self._any_shared:
            for bucket in self._buckets:
                self._reduce_bucket(bucket)
        for mirror, computed in self._mirrors:
            mirror.copy_(computed)

    def _reduce_bucket(self, bucket: list[_Shared]) -> None:
        world, me = range(self._world_size), self._rank
        like = self._dtype_source
        outgoing: list[list[Tensor]] = [[] for _ in world]
        mine = [shared.part(me) for shared in bucket]
        for shared in bucket:
            for holder in shared.holders:
                start, end = shared.part(holder)
                outgoing[holder].append(shared.gradient[start:end])
        send = [sum(piece.numel() for piece in pieces) for pieces in outgoing]
        receive = [
            sum(end - start for shared, (start, end) in zip(bucket, mine, strict=True) if peer in shared.holders)
            for peer in world
        ]
        flat = torch.cat([piece for pieces in outgoing for piece in pieces]) if bucket else like.new_empty(0)
        arrived = exchange(flat, send, receive, self._peers, me, self._backend).split(receive)
        cursor = [0] * self._world_size
        sums = []
        for shared, (start, end) in zip(bucket, mine, strict=True):
            total: Tensor | None = None
            for holder in shared.holders:
                piece = arrived[holder][cursor[holder] : cursor[holder] + end - start]
                cursor[holder] += end - start
                if total is None:
                    total = piece.to(torch.float32) if piece.element_size() < 4 else piece.clone()
                else:
                    total += piece
            assert total is not None
            sums.append(total.to(like.dtype))
        back = [piece for peer in world for shared, piece in zip(bucket, sums, strict=True) if peer in shared.holders]
        flat = torch.cat(back) if back else like.new_empty(0)
        arrived = exchange(flat, receive, send, self._peers, me, self._backend).split(send)
        cursor = [0] * self._world_size
        for shared in bucket:
            for holder in shared.holders:
                start, end = shared.part(holder)
                shared.gradient[start:end] = arrived[holder][cursor[holder] : cursor[holder] + end - start]
                cursor[holder] += end - start
