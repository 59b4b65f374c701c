"""Child processes that die with their parent, and what they have started with them."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from megatron_lazarus.elastic.settings import EXIT_MEANINGS

_PR_SET_PDEATHSIG = 1


async def start_process(
    command: Sequence[str],
    environment: Mapping[str, str],
    log: Path | None,
    *,
    prepare: Callable[[], None] = lambda: None,
    descriptors: Sequence[int] = (),
) -> asyncio.subprocess.Process:
    """Start a child with a session of its own that logs to a file (None: where we do) and inherits descriptors.

    ``prepare`` is called in it before the command takes over.
    """
    output = None
    if log is not None:
        log.parent.mkdir(parents=True, exist_ok=True)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    parent = os.getpid()

    def begin() -> None:
        die_with(parent)
        prepare()

    try:
        return await asyncio.create_subprocess_exec(
            *command,
            env=environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            # A group of its own: what it has started is killed with it.
            start_new_session=True,
            preexec_fn=begin,
            pass_fds=descriptors,
        )
    finally:
        if output is not None:
            os.close(output)


def die_with(parent: int) -> None:
    """In a new process: be killed when the parent dies, however it dies."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def kill_group(pid: int) -> None:
    """SIGKILL a process that has a session of its own, and what it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def describe_exit(code: int) -> str:
    """How a process ended that has this return code (negative: the signal's number)."""
    if code < 0:
        return f"killed by {_signal_name(-code)}"
    return f"exit status {code}" + (f" ({EXIT_MEANINGS[code]})" if code in EXIT_MEANINGS else "")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
