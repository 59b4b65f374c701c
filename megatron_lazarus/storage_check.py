"""Whether a folder has the semantics that checkpoints and leases rely on: tried out, with files that are removed."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from megatron_lazarus.stack_check import Check

MAX_SKEW_S = 5.0
"""An owner's file counts as abandoned after a minute by the file system's clock, against which this is little."""

_LEAST_FREE = 1 << 30


def check_folder(folder: Path, what: str) -> Iterator[Check]:
    """All checks of one folder, ``what`` it is for; it may not exist yet."""
    existing = next(parent for parent in [folder.absolute(), *folder.absolute().parents] if parent.is_dir())
    yield _kind(existing, what)
    yield _space(existing, what)
    try:
        probe = Path(tempfile.mkdtemp(prefix=".lazarus-doctor-", dir=existing))
    except OSError as error:
        yield Check(what, str(existing), f"nothing can be written there: {error}")
        return
    try:
        for name, attempt, consequence in _ATTEMPTS:
            try:
                attempt(probe)
                yield Check(what, name)
            except (OSError, AssertionError) as error:
                yield Check(what, f"{name}: {error or 'it does not'}", consequence)
        yield _skew(probe, what)
    finally:
        shutil.rmtree(probe, ignore_errors=True)


def _kind(folder: Path, what: str) -> Check:
    mounts = []
    for line in Path("/proc/mounts").read_text(encoding="utf-8", errors="replace").splitlines():
        _, point, kind, *_ = line.split()
        if folder == Path(point) or Path(point) in folder.parents:
            mounts.append((len(point), kind))
    return Check(what, f"{folder}, file system {max(mounts)[1] if mounts else 'unknown'}")


def _space(folder: Path, what: str) -> Check:
    usage = shutil.disk_usage(folder)
    free = f"{usage.free / 2**30:.1f} of {usage.total / 2**30:.1f} GiB free"
    problem = "a save that does not fit fails, and the checkpoints before it stay" if usage.free < _LEAST_FREE else ""
    return Check(what, free, problem)


def _replaces(probe: Path) -> None:
    """A reader that has the old file open keeps it, everyone else gets the new one, nobody gets none."""
    target, other = probe / "replaced", probe / "replacing"
    target.write_bytes(b"old")
    other.write_bytes(b"new")
    with target.open("rb") as reader:
        os.replace(other, target)
        assert target.read_bytes() == b"new", "the new file is not seen under its name"
        assert not other.exists(), "the old name stays"
        assert reader.read() == b"old", "who reads the old file gets something else"


def _excludes(probe: Path) -> None:
    path = probe / "exclusive"
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return
    raise AssertionError("a second process may create the same file")


def _links(probe: Path) -> None:
    source, target = probe / "linked", probe / "link"
    source.write_bytes(b"owner")
    os.link(source, target)
    try:
        os.link(source, target)
    except FileExistsError:
        return
    raise AssertionError("a second process may create the same link")


def _flushes(probe: Path) -> None:
    path = probe / "flushed"
    with path.open("wb") as file:
        file.write(b"x" * 4096)
        file.flush()
        os.fsync(file.fileno())
    descriptor = os.open(probe, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _renames_folders(probe: Path) -> None:
    (probe / "tag.incomplete").mkdir()
    (probe / "tag.incomplete" / "file").write_bytes(b"x")
    os.rename(probe / "tag.incomplete", probe / "tag")
    assert (probe / "tag" / "file").read_bytes() == b"x", "its content is not there"


_ATTEMPTS: tuple[tuple[str, Callable[[Path], None], str], ...] = (
    ("replaces a file atomically", _replaces, "a crash may leave no checkpoint to resume from: 'latest' may be lost"),
    ("creates a file exclusively (O_EXCL)", _excludes, "two coordinators may rule at once (elastic.lease_path)"),
    ("creates hard links exclusively", _links, "save_checkpoint fails: the owner of the folder cannot be told"),
    (
        "flushes files and folders (fsync)",
        _flushes,
        "save_checkpoint fails, or a power cut loses published checkpoints",
    ),
    ("renames folders", _renames_folders, "lazarus checkpoint import and export fail"),
)


def _skew(probe: Path, what: str) -> Check:
    path = probe / "clock"
    before = time.time()
    path.write_bytes(b"x")
    os.utime(path)
    after = time.time()
    written = path.stat().st_mtime
    skew = max(written - after, before - written, 0.0)
    found = f"clock of the file system: {skew:.1f} s from this host's"
    if skew <= MAX_SKEW_S:
        return Check(what, found)
    return Check(what, found, "hosts disagree about when a file was written: let NTP run on this host and the server")
