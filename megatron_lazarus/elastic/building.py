"""Makes the objects of a process group so that their making can be given up.

Their constructors block in C++: a store that dies in between is tried again until the time-out, and gloo, where
connections are shut while it makes them, has been seen to wait for ever. Nothing ends such a call. So it is made on a
thread of its own, which is left behind, with what it holds, when the generation breaks.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch.distributed as dist

PATIENCE_S = 1.0
"""How long a call may go on in a generation that is broken: most end at once when their connections are shut."""

_TURN_S = 0.05

Made = TypeVar("Made")


class MakingAbandoned(RuntimeError):
    """The generation broke while one of the objects of its group was made."""


def make(constructor: Callable[..., Made], is_broken: Callable[[], bool], *arguments: Any, **named: Any) -> Made:
    """``constructor(*arguments, **named)``, or what it raises; MakingAbandoned if the generation breaks meanwhile."""
    made: list[Made] = []
    errors: list[BaseException] = []
    done = threading.Event()

    def run() -> None:
        try:
            made.append(constructor(*arguments, **named))
        except BaseException as error:
            errors.append(error)
        finally:
            done.set()

    threading.Thread(target=run, name="lazarus-build", daemon=True).start()
    broken_since: float | None = None
    while not done.wait(_TURN_S):
        if not is_broken():
            continue
        broken_since = broken_since or time.monotonic()
        if time.monotonic() - broken_since > PATIENCE_S:
            raise MakingAbandoned(f"{constructor.__name__}: the generation broke while it was made")
    if errors:
        raise errors[0]
    return made[0]


@contextlib.contextmanager
def gloo_groups_can_be_abandoned(is_broken: Callable[[], bool]) -> Iterator[None]:
    """Within it, torch's ``init_process_group`` makes its gloo group with ``make``."""
    c10d: Any = dist.distributed_c10d
    original = c10d.ProcessGroupGloo

    class _Abandonable(type):
        # torch makes the group by this name, and asks whether others are instances of it.
        def __call__(cls, *arguments: Any, **named: Any) -> Any:
            return make(original, is_broken, *arguments, **named)

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, original)

    c10d.ProcessGroupGloo = _Abandonable("ProcessGroupGloo", (), {})
    try:
        yield
    finally:
        c10d.ProcessGroupGloo = original
