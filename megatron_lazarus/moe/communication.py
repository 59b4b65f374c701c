"""The collectives of the experts, in one place: whoever watches progress sees each of them begin and end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

Message = tuple[Tensor, int, int]
"""(what, the peer's rank, tag)"""

# torch 2.13 renamed it and warns at every use of the old name.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


class Communicator:
    """Exchanges over the world group. ``observe(True)`` is called before, ``observe(False)`` after every one.

    ``waited_s`` grows by the seconds that other ranks took longer than this one to reach a gathering of counts, where
    every rank has to stop anyway.
    """

    def __init__(self) -> None:
        self.observe: Callable[[bool], None] = lambda waiting: None
        self.waited_s = 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Mark what runs inside as waiting for other ranks. Not left by an exception: then it still waits."""
        self.observe(True)
        yield
        self.observe(False)

    def watched(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, which waits for other ranks, marked as that."""

        def waits(*arguments: Any, **options: Any) -> Any:
            with self.waiting():
                return function(*arguments, **options)

        return waits

    def gather_counts(self, counts: Tensor, world_size: int) -> npt.NDArray[np.int64]:
        """``counts`` [n] of every rank, on the host, as [ranks, n]."""
        out = counts.new_empty(world_size * counts.numel())
        # On a device the exchange begins when what was queued before it is done.
        ready = None if counts.device.type == "cpu" else torch.Event(counts.device)
        if ready is not None:
            ready.record()
        with self.waiting():
            start = time.monotonic()
            _all_gather(out, counts)
            if ready is not None:
                ready.synchronize()
                start = time.monotonic()
            gathered: npt.NDArray[np.int64] = out.cpu().numpy()
            self.waited_s += time.monotonic() - start
        return gathered.reshape(world_size, -1)

    def take_waited_s(self) -> float:
        """``waited_s`` since the last call."""
        waited, self.waited_s = self.waited_s, 0.0
        return waited

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
