"""Kills jobs while they save: ``python -m tests.crash.kill --kills 300 --seed 1``.

Jobs are forked from this process, which has everything imported. Each loads what the one before has left, goes on, and
is killed: at a random moment, or (``--points``) just before the n-th call that changes the directory, for every n.
After each, what a load takes must be the newest checkpoint that was told to be complete, or the one that was just
becoming so, with the right content.
"""

from __future__ import annotations

import argparse
import builtins
import itertools
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from megatron_lazarus.checkpoint.engine import FullSaves
from megatron_lazarus.checkpoint.manifest import read_latest
from tests.crash.job import Ranks, check_content, check_files, newest

SETTINGS = (
    FullSaves(persist_experts=1, keep_last=2),
    FullSaves(persist_experts=1, keep_last=1, content="moments"),
    FullSaves(keep_last=2),
)
SAVES = 3
LIMIT_S = 60.0


def job(save_dir: str, settings: FullSaves, tell: int, same_tag: bool) -> None:
    """Load, then save a few times; every checkpoint that is complete is told, as a line of text."""
    ranks = Ranks(settings)
    step = ranks.call(lambda rank: rank.load(save_dir))[0]
    os.write(tell, f"loaded {step}\n".encode())
    for _ in range(SAVES):
        step += 1
        # A tag that is saved again must never be without a complete checkpoint meanwhile.
        published, reason = ranks.save(save_dir, step, "again" if same_tag else None)
        os.write(tell, (f"saved {step}\n" if published else f"failed {step} {reason}\n").encode())


@contextmanager
def _counted(before_call: Callable[[str], None]) -> Iterator[None]:
    """Inside, ``before_call`` is called before everything that changes the file system."""
    names = ("fsync", "replace", "rename", "unlink", "link", "mkdir", "rmdir", "utime")
    originals = {name: getattr(os, name) for name in names}
    original_open = builtins.open

    def wrapped(name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            before_call(name)
            return originals[name](*arguments, **options)

        return call

    def opening(file: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        if set(mode) & set("wxa"):
            before_call("open")
        return original_open(file, mode, *arguments, **options)

    for name in names:
        setattr(os, name, wrapped(name))
    builtins.open = opening  # type: ignore[assignment]
    try:
        yield
    finally:
        for name, function in originals.items():
            setattr(os, name, function)
        builtins.open = original_open


class _Points:
    """Kills the process at the n-th call."""

    def __init__(self, point: int) -> None:
        self._left, self._numbers = point, itertools.count()

    def __call__(self, name: str) -> None:
        if next(self._numbers) == self._left:
            os.kill(os.getpid(), signal.SIGKILL)


def run_and_kill(
    save_dir: str, settings: FullSaves, *, delay: float | None, point: int | None, same_tag: bool = False
) -> tuple[bool, list[str]]:
    """(whether the job was killed rather than done, what it told)."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            with _counted(_Points(point if point is not None else 1 << 62)):
                job(save_dir, settings, writing, same_tag)
            os._exit(0)
        except BaseException as error:
            os.write(writing, f"error {type(error).__name__}: {error}\n".encode())
            os._exit(1)
    os.close(writing)
    if delay is not None:
        time.sleep(delay)
        os.kill(child, signal.SIGKILL)
    # A pipe of a process that ends is closed, so this comes to an end too; the alarm is for one that hangs.
    signal.alarm(int(LIMIT_S))
    with os.fdopen(reading) as pipe:
        told = pipe.read().splitlines()
    _, status = os.waitpid(child, 0)
    signal.alarm(0)
    assert status in (0, signal.SIGKILL), told
    return status != 0, told


def check(save_dir: str, before: int, told: list[str]) -> int:
    """What is loaded now is right; returns its step. ``before``: the step that the job began with."""
    for line in told:
        assert not line.startswith(("failed", "error")), told
    if told:
        assert told[0] == f"loaded {before}", f"{told}, but the one before ended at {before}"
    done = max([before, *(int(line.split()[1]) for line in told if line.startswith("saved"))])
    chosen = newest(save_dir)
    if chosen is None:
        assert done == 0, f"step {done} was complete, and nothing is left"
        return 0
    tag, manifest = chosen
    assert tag == read_latest(save_dir), f"{tag} is loaded, not the latest"
    assert manifest.global_steps in (done, done + 1), f"step {manifest.global_steps} is loaded; {told}"
    check_content(save_dir, manifest)
    check_files(save_dir)
    return manifest.global_steps


def random_moments(count: int, seed: int, folder: str) -> int:
    """Kill so many jobs at random moments; those that were done before do not count."""
    source = random.Random(seed)
    kills = 0
    for number, settings in enumerate(SETTINGS):
        save_dir = os.path.join(folder, f"random{number}")
        began = time.monotonic()
        _, told = run_and_kill(save_dir, settings, delay=None, point=None)
        duration = time.monotonic() - began
        step = check(save_dir, 0, told)
        wanted = kills + len(range(number, count, len(SETTINGS)))
        while kills < wanted:
            delay = source.uniform(0, duration)
            same_tag = source.random() < 0.3
            killed, told = run_and_kill(save_dir, settings, delay=delay, point=None, same_tag=same_tag)
            kills += killed
            step = check(save_dir, step, told)
    return kills


def all_points(folder: str, every: int = 1) -> int:
    """Kill a job before every ``every``-th call that changes the file system; returns how many that were."""
    kills = 0
    for number, settings in enumerate(SETTINGS):
        save_dir, step = os.path.join(folder, f"points{number}"), 0
        for point in itertools.count(0, every):
            killed, told = run_and_kill(save_dir, settings, delay=None, point=point, same_tag=point % 5 == 4)
            step = check(save_dir, step, told)
            kills += killed
            if not killed:
                break
    return kills


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=300, help="at random moments (%(default)s)")
    parser.add_argument("--points", action="store_true", help="also before every call that changes the directory")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    folder = tempfile.mkdtemp(prefix="lazarus-crash-")
    try:
        began = time.monotonic()
        killed = random_moments(arguments.kills, arguments.seed, folder)
        print(f"{killed} jobs were killed at a random moment: each load was of the newest one")
        if arguments.points:
            print(f"{all_points(folder)} jobs were killed, one before every call: each load was of the newest one")
        print(f"{time.monotonic() - began:.0f} s")
    finally:
        shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
