"""Faults at named points of the step protocol and of recovery.

``CHAOS_FAULT`` of a node is ``point:step`` or ``point:step:how``, several separated by commas: when the point is
reached with at least so many committed steps, the process is killed, or it is to ``stop``, ``hang`` (its heartbeats go
on), ``raise``, be ``slow`` for a while or with every micro-batch from then on (``lame``), or ``lose`` the outcome of
what the others have completed.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from megatron_lazarus import dense_state, expert_state, recovery
from megatron_lazarus.checkpoint import background
from megatron_lazarus.moe.communication import Communicator

STEP_POINTS = (
    "before-backward",
    "before-reduce",
    "in-reduce",
    "before-vote",
    "after-vote",
    "before-experts-step",
    "before-dense-step",
    "after-step",
)
SCRIPT_POINTS = ("between", "after-backward", "second", "evaluating")
RECOVERY_POINTS = ("built", "agreed", "migration", "second-layer", "moved", "settled")


class Faults:
    """Binds the faults named in ``text`` to ``engine``, which has just entered its first generation."""

    def __init__(self, text: str, engine: Any) -> None:
        self._engine = engine
        self._data: list[tuple[int, str]] = []
        self._script: list[tuple[str, int, str]] = []
        for entry in filter(None, text.split(",")):
            point, step, how = (*entry.split(":"), "kill")[:3]
            if point == "data":
                self._data.append((int(step), how))
            elif point in SCRIPT_POINTS:
                self._script.append((point, int(step), how))
            elif not point.startswith("join-"):
                self._wrap(*places(engine)[point], int(step), how, entry)

    def at_data(self, step: int) -> None:
        for when, how in list(self._data):
            if step >= when and how == "lame":
                time.sleep(0.06)
            elif step >= when:
                self._data.remove((when, how))
                strike(how, f"data:{when}:{how}")

    def strike_at(self, point: str, step: int) -> None:
        """The script is at one of its points."""
        for entry in [entry for entry in self._script if entry[0] == point and step >= entry[1]]:
            self._script.remove(entry)
            strike(entry[2], ":".join(map(str, entry)))

    def _wrap(self, owner: Any, name: str, step: int, how: str, what: str) -> None:
        original = getattr(owner, name)

        def wrapped(*arguments: Any, **options: Any) -> Any:
            fits = {
                "in-backward": self._engine._context.phase == "backward",
                "evaluated": not self._engine.module.training,
            }.get(what.split(":")[0], True)
            if self._engine.global_steps >= step and fits:
                setattr(owner, name, original)
                if how == "lose":
                    original(*arguments, **options)
                strike(how, what)
            return original(*arguments, **options)

        setattr(owner, name, wrapped)


def strike(how: str, what: str) -> None:
    """Let it happen, here and now."""
    print(f"fault {what}", flush=True)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how == "hang":
        time.sleep(3600)
    elif how == "slow":
        time.sleep(1.5)
    elif how == "lose":
        # Until then the others have it, and are at what comes next.
        time.sleep(0.3)
        raise RuntimeError("gloo: this member does not get the outcome that others have got")
    elif how == "raise":
        raise ValueError("a bad batch")
    else:
        raise AssertionError(f"unknown fault {what}")


def places(engine: Any) -> dict[str, tuple[Any, str]]:
    """What is called at each point: (object, name of its function)."""
    return {
        "before-backward": (engine, "_backward"),
        "evaluated": (engine.deepspeed_engine, "forward"),
        "in-forward": (engine.experts.peers, "gather_counts"),
        "late-forward": (engine.experts.layers[1].experts, "forward"),
        "in-backward": (engine.experts.peers, "all_to_all"),
        "dense-reduce": (engine.deepspeed_engine, "allreduce_gradients"),
        "before-reduce": (engine.experts, "reduce_gradients"),
        "in-reduce": (engine.experts._exchange, "_reduce_bucket"),
        "before-vote": (engine.protocol, "_vote"),
        "after-vote": (engine.protocol, "decide"),
        "before-experts-step": (engine.experts, "commit"),
        "before-dense-step": (engine.deepspeed_engine, "step"),
        "after-step": (engine.experts, "clear_step"),
        "rebalance": (engine.rebalancer, "run"),
        "migration": (engine.experts, "change_plan"),
        "second-layer": (engine.experts.layers[1].experts, "bind"),
        "moved": (engine.experts, "_bind"),
        "evaluation": (engine, "_evaluate"),
        "saving": (engine._checkpoint.writer, "_write_record"),
        "saved": (engine._checkpoint, "save"),
        "publishing": (engine._checkpoint, "wait_for"),
        "reporting": (background, "write_reserved"),
        "published": (background, "write_atomically"),
        "loading": (engine._checkpoint, "load"),
        "loaded": (engine.experts.optimizer, "load_steps"),
        "asking": (engine, "any_rank"),
        "asked": (engine.protocol, "all_reduce"),
        "finish": (engine, "finish"),
        **({} if engine._elastic is None else _recovery_places(engine)),
    }


def _recovery_places(engine: Any) -> dict[str, tuple[Any, str]]:
    elastic = engine._elastic
    return {
        "built": (elastic, "_reports"),
        "agreed": (recovery, "hold_everything"),
        "settled": (engine, "settle"),
        "change": (elastic, "_agree_on_change"),
        "giving-state": (dense_state, "pack"),
    }


def faults_while_joining(text: str) -> None:
    """Faults of a process that has no engine yet.

    ``join-state``: while it takes the state over; ``join-records``: before it takes records over; ``join-barrier``:
    when it has them, before the others know.
    """
    points: dict[str, tuple[Any, str]] = {
        "join-state": (dense_state, "unpack"),
        "join-records": (expert_state, "migrate"),
        "join-barrier": (Communicator, "barrier"),
    }
    for entry in filter(None, text.split(",")):
        point = entry.split(":")[0]
        if point in points:
            owner, name = points[point]
            setattr(owner, name, lambda *_, entry=entry: strike("kill", entry))
