"""The end of a script of DeepSpeed's, which just ends: members of a job end together, with their last checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

MADE: list[Any] = []
"""The engines that the script in this process has made. In a module of its own: the one that runs scripts is loaded
twice, as a program and as a module."""


def end_with(script: Callable[[], None]) -> None:
    """Run ``script``; if it ends well, finish its engines. Raises what it raises."""
    try:
        script()
    except SystemExit as ending:
        if ending.code not in (None, 0) or _has_left(ending):
            raise
    for engine in MADE:
        engine.finish()


def _has_left(ending: SystemExit) -> bool:
    from megatron_lazarus.elastic.membership import NodeDrained

    return isinstance(ending, NodeDrained)
