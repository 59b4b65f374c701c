"""The collectives of the experts, in one place: whoever watches progress sees each of them begin and end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist
from torch import Tensor

Message = tuple[Tensor, int, int]
"""(what, the peer's rank, tag)"""

# torch 2.13 renamed it and warns at every use of the old name.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


class Communicator:
    """Exchanges over the world group. ``observe(True)`` is called before, ``observe(False)`` after every one."""

    def __init__(self) -> None:
        self.observe: Callable[[bool], None] = lambda waiting: None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Mark what runs inside as waiting for other ranks. Not left by an exception: then it still waits."""
        self.observe(True)
        yield
        self.observe(False)

    def all_gather(self, values: Tensor, world_size: int) -> Tensor:
        """``values`` [n] of every rank, as [ranks, n]."""
        out = values.new_empty(world_size * values.numel())
        with self.waiting():
            _all_gather(out, values)
        return out.view(world_size, -1)

    def all_to_all(self, rows: Tensor, send: list[int], receive: list[int]) -> Tensor:
        """Send the next ``send[j]`` rows to each rank j; returns [sum(receive), ...], by source rank."""
        out = rows.new_empty((sum(receive), *rows.shape[1:]))
        with self.waiting():
            dist.all_to_all_single(out, rows.contiguous(), receive, send)
        return out

    def point_to_point(
        self, sends: Sequence[tuple[Tensor, int, int]], receives: Sequence[tuple[Tensor, int, int]]
    ) -> None:
        """All of these at once: (tensor, peer, tag). Peers issue theirs in an order that agrees."""
        operations = [dist.P2POp(dist.irecv, tensor, peer, None, tag) for tensor, peer, tag in receives]
        operations += [dist.P2POp(dist.isend, tensor, peer, None, tag) for tensor, peer, tag in sends]
        # Counted also where there is nothing to do: ranks are compared by how many exchanges they have begun.
        with self.waiting():
            for work in dist.batch_isend_irecv(operations) if operations else ():
                work.wait()

    def barrier(self) -> None:
        """Return when every rank has called it."""
        with self.waiting():
            dist.barrier()

    def all_reduce(self, values: Tensor) -> Tensor:
        """Sum of every rank's ``values``, in place."""
        with self.waiting():
            dist.all_reduce(values)
        return values
