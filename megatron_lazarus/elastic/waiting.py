"""Lets a thread give up a gloo collective that nothing will complete any more.

Shutting the connections frees most waiting threads, but not all: where gloo's own thread answers a peer's request and
finds the connection gone, the operation is lost without anybody being told (1-3 % of broken all-reduces), and the
thread that waits for it stays until the group's time-out. So waiting itself is made interruptible: ``Work.wait``,
which every synchronous collective calls, waits in short turns and looks between them whether its group is broken.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import OpType, Work  # type: ignore[attr-defined]

TURN = timedelta(seconds=0.05)

_NO_LIMIT = timedelta(0)
# ``Work._get_op_type`` gives the number, which equals no OpType.
_POINT_TO_POINT = tuple(int(kind) for kind in (OpType.SEND, OpType.RECV, OpType.RECVANYSOURCE))
_TIMED_OUT = "Operation timed out!"
_original_wait: Callable[..., bool] = Work.wait


class CollectiveAbandoned(RuntimeError):
    """The generation broke while this thread waited in one of its collectives."""


class AbandonedWorks:
    """Which operations have been given up. While one is in flight, destroying its group would wait for it."""

    def __init__(self) -> None:
        self.broken = False
        self._works: list[Any] = []

    def start(self) -> None:
        """From now on waits of this process are those of a new group."""
        global _current
        Work.wait = _wait  # type: ignore[assignment]
        _current = weakref.ref(self)

    def add(self, work: Any) -> None:
        self._works.append(work)

    @property
    def in_flight(self) -> bool:
        self._works = [work for work in self._works if not work.is_completed()]
        return bool(self._works)


_current: Callable[[], AbandonedWorks | None] = lambda: None  # noqa: E731


def _wait(work: Any, timeout: timedelta = _NO_LIMIT) -> bool:
    abandoned = _current()
    # A send or receive is ended by a wait that times out.
    if abandoned is None or timeout != _NO_LIMIT or work._get_op_type() in _POINT_TO_POINT:
        return _original_wait(work, timeout)
    while True:
        try:
            return _original_wait(work, TURN)
        except RuntimeError as error:
            if _TIMED_OUT not in str(error):
                raise
            if work.is_completed():
                # It has finished since this turn ended: how, only another wait tells.
                return _original_wait(work, timeout)
            if abandoned.broken:
                abandoned.add(work)
                raise CollectiveAbandoned("gloo: the generation broke during a collective") from None
