"""The end of a script of DeepSpeed's, which just ends: members of a job end together, with their last checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


def end_with(script: Callable[[], None], engines: Sequence[Any]) -> None:
    """Run ``script``; if it ends well, finish the ``engines`` that it has made by then. Raises what it raises."""
    try:
        script()
    except SystemExit as ending:
        if ending.code not in (None, 0) or _has_left(ending):
            raise
    for engine in engines:
        engine.finish()


def _has_left(ending: SystemExit) -> bool:
    from megatron_lazarus.elastic.membership import NodeDrained

    return isinstance(ending, NodeDrained)
