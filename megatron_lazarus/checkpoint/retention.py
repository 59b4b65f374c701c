"""Which checkpoints stay on storage: no file that a complete checkpoint names is ever deleted."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from typing import Any

from megatron_lazarus.checkpoint.files import CheckpointError
from megatron_lazarus.checkpoint.manifest import NAME, Manifest, read_latest

INCOMPLETE = "incomplete.json"
"""Marks a tag directory whose checkpoint is being written, or never was finished."""

RETIRED = "retired.json"
"""What the manifest is called once its checkpoint does not count any more; others may still need its files."""


def mark_incomplete(directory: str, attempt: str) -> None:
    """``attempt`` is going to write into ``directory``."""
    # Not flushed, since training waits for it: a folder whose mark is lost is merely not tidied up.
    with open(os.path.join(directory, INCOMPLETE), "w", encoding="utf-8") as file:
        json.dump({"attempt": attempt}, file)


def complete_tags(save_dir: str) -> dict[str, Manifest]:
    """Every tag with a readable manifest."""
    found = {}
    for name in sorted(os.listdir(save_dir)):
        if os.path.isfile(os.path.join(save_dir, name, NAME)):
            with contextlib.suppress(CheckpointError):
                found[name] = Manifest.read(os.path.join(save_dir, name))
    return found


def superseded(manifests: dict[str, Manifest], newest: str, keep_last: int) -> list[str]:
    """The tags that ``keep_last`` leaves out, oldest first, seen from ``newest``.

    Checkpoints of later steps than the newest one belong to a run that was given up at an earlier step; they stay.
    """
    step = manifests[newest].global_steps
    older = [name for name, manifest in manifests.items() if name != newest and manifest.global_steps <= step]
    older.sort(key=lambda name: manifests[name].global_steps)
    return older[: max(0, len(older) - (keep_last - 1))]


def prune(
    save_dir: str,
    keep_last: int | None,
    newest: str,
    active: Collection[str],
    preparing: AbstractContextManager[Any],
) -> list[str]:
    """Retire checkpoints beyond the ``keep_last`` newest (None: none) and delete what no complete one names.

    ``active``: tokens of attempts in progress, whose files are left alone; while ``preparing`` is held, none begins.
    Returns the retired tags. Raises OSError.
    """
    manifests = complete_tags(save_dir)
    untouched = {newest, read_latest(save_dir)}
    retired = []
    for name in superseded(manifests, newest, keep_last) if keep_last is not None and newest in manifests else []:
        if name not in untouched:
            # Before any of its files goes, it must not count as complete any more.
            os.rename(os.path.join(save_dir, name, NAME), os.path.join(save_dir, name, RETIRED))
            del manifests[name]
            retired.append(name)
    needed = {
        os.path.join(save_dir, tag, entry.name)
        for manifest in manifests.values()
        for tag, entry, _ in manifest.all_files()
    }
    damaged = {
        name
        for name in os.listdir(save_dir)
        if name not in manifests and os.path.isfile(os.path.join(save_dir, name, NAME))
    }
    if damaged:
        # What a damaged manifest names is unknown; nobody can say what is not needed.
        return retired
    for name in os.listdir(save_dir):
        directory = os.path.join(save_dir, name)
        if name in manifests or name in untouched:
            continue
        if any(os.path.isfile(os.path.join(directory, mark)) for mark in (RETIRED, INCOMPLETE)):
            with preparing:
                if marked_for(directory) not in active:
                    _delete(directory, lambda path: path not in needed)
    return retired


def discard(directory: str, suffix: str, token: str, preparing: AbstractContextManager[Any]) -> None:
    """Delete what an attempt that failed has left: everything, or in a tag of others the files with its ``suffix``.

    Nothing is deleted where the directory is another attempt's by now; ``preparing``: see ``prune``. Raises OSError.
    """
    if suffix:
        _delete(directory, lambda path: suffix in os.path.basename(path))
        return
    failed = f"{directory}.{token}.failed"
    with preparing:
        if marked_for(directory) != token or os.path.isfile(os.path.join(directory, NAME)):
            return
        # Ranks that still write must not find the folder: a file they add while it is deleted would stay for ever.
        os.rename(directory, failed)
    _delete(failed, lambda path: True)


def marked_for(directory: str) -> str | None:
    """The attempt in whose hands an incomplete tag directory is; None if it is not marked as one."""
    try:
        with open(os.path.join(directory, INCOMPLETE), encoding="utf-8") as file:
            return str(json.load(file)["attempt"])
    except (OSError, ValueError, KeyError):
        return None


def _delete(directory: str, unneeded: Callable[[str], bool]) -> None:
    """Delete unneeded files, the marks last, and the folders that are empty then."""
    marks = {os.path.join(directory, RETIRED), os.path.join(directory, INCOMPLETE)}
    for folder, _, names in os.walk(directory, topdown=False):
        for path in (os.path.join(folder, name) for name in names):
            if path not in marks and unneeded(path):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
    left = [path for folder, _, names in os.walk(directory) for path in (os.path.join(folder, n) for n in names)]
    if set(left) <= marks:
        shutil.rmtree(directory)
