"""Writes saves in the background and, on rank 0, publishes them: training never waits for storage.

Order: every rank writes and flushes its files, then its report; rank 0 collects the reports, flushes the folders,
writes the manifest (flushed, atomic), moves ``latest`` (atomic). Whatever fails before the manifest is there leaves
the checkpoints before it as they were.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace

from megatron_lazarus.checkpoint.attempt import Attempt, PlannedFile, Publication, Save, composed, is_published
from megatron_lazarus.checkpoint.files import (
    CheckpointError,
    fsync_path,
    leave_empty,
    reserve,
    write_atomically,
    write_reserved,
)
from megatron_lazarus.checkpoint.manifest import NAME as MANIFEST
from megatron_lazarus.checkpoint.manifest import ExpertEntry, FileEntry, Manifest, PartEntry
from megatron_lazarus.checkpoint.owner import BEAT_S, Owner
from megatron_lazarus.checkpoint.retention import INCOMPLETE, discard, prune
from megatron_lazarus.checkpoint.writer import write_bytes, write_image, write_part

logger = logging.getLogger(__name__)

PERSIST_LIMIT_S = 600.0
"""How long rank 0 waits for the other ranks' files before a save counts as failed."""

_POLL_S = 0.01


class Cancelled(CheckpointError):
    """The save is not wanted any more."""


class BackgroundWriter:
    """A thread that brings saves to storage, in order.

    ``limit_s``: see ``PERSIST_LIMIT_S``. On rank 0, ``owner`` is of the directory, and ``newest`` the (directory,
    manifest) that was published or loaded last: what a save does not write is taken from there. ``broken``: a tag
    directory of which that cannot be. ``active``: tokens of attempts whose folders exist already; ``preparing`` is held
    while one makes them.
    """

    def __init__(self, limit_s: float = PERSIST_LIMIT_S) -> None:
        self.limit_s = limit_s
        self.owner: Owner | None = None
        self.newest: tuple[str, Manifest] | None = None
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._publishing = threading.Lock()
        self.broken: str | None = None
        self._pending: list[Save] = []
        self.active: set[str] = set()
        self.preparing = threading.Lock()
        self._thread: threading.Thread | None = None

    def submit(self, save: Save) -> None:
        """Take a save over; ``save.decided`` tells when it is done, on ranks other than 0 when its part is written."""
        self._pending = [one for one in self._pending if not one.finished.is_set()]
        self._pending.append(save)
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="lazarus-checkpoint", daemon=True)
            self._thread.start()
        self._queue.put(lambda: self._process(save))

    def withdraw(self, save: Save) -> None:
        """Delete what this rank has written of a save that failed on another one."""
        self._queue.put(lambda: self._discard(save, with_report=True))

    def cancel(self, reason: str) -> None:
        """From now on no save in hand is published; one that just is being published may still be."""
        for save in self._pending:
            save.cancelled.set()
        # Whoever holds the lock has passed the last check; what it does then is a few small files.
        if self._publishing.acquire(timeout=self.limit_s):
            for save in self._pending:
                save.decide(False, reason)
            self._publishing.release()

    def wait(self, limit_s: float) -> bool:
        """Whether everything in hand is decided within so long."""
        deadline = time.monotonic() + limit_s
        return all(save.decided.wait(max(0.0, deadline - time.monotonic())) for save in self._pending)

    def has_let_go(self, limit_s: float) -> bool:
        """Whether the thread is done with all cancelled saves within so long."""
        return all(save.finished.wait(limit_s) for save in self._pending if save.cancelled.is_set())

    def close(self, limit_s: float) -> None:
        """Wait for what is in hand, end the thread, let the directory go."""
        if not self.wait(limit_s):
            logger.error("a checkpoint is not written within %g s; it is given up", limit_s)
            self.cancel("the process ends")
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(timeout=5)
        if self.owner is not None:
            self.owner.release()
            self.owner = None

    # -- the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            try:
                task = self._queue.get(timeout=BEAT_S)
            except queue.Empty:
                self._beat()
                continue
            if task is None:
                return
            task()

    def _beat(self) -> None:
        if self.owner is not None:
            try:
                self.owner.beat()
            except (OSError, CheckpointError) as error:
                # The next save meets it too, and fails by it.
                logger.debug("no sign of life in the checkpoint directory: %s", error)

    def _process(self, save: Save) -> None:
        started = time.monotonic()
        try:
            save.wait_for_copy()
            report = self.write_files(save)
            save.release()
            if save.publication is None:
                save.decide(True)
            else:
                self.publish(save, save.publication, report, started + self.limit_s)
        except Exception as error:
            self._failed(save, error)
        finally:
            save.release()
            self.active.discard(save.attempt.token)
            save.finished.set()

    def _failed(self, save: Save, error: Exception) -> None:
        """Free the space, tell rank 0, decide."""
        reason = f"rank {save.rank}: {type(error).__name__}: {error}"
        attempt = save.attempt
        if save.publication is not None and is_published(attempt):
            logger.warning("checkpoint %s is complete, in spite of: %s", attempt.directory, reason)
            save.decide(True)
            return
        given_up = isinstance(error, Cancelled) or (save.publication is None and not os.path.isdir(attempt.directory))
        logger.log(
            logging.INFO if given_up else logging.ERROR,
            "checkpoint %s (generation %d) failed: %s",
            attempt.directory,
            attempt.generation,
            reason,
        )
        self._discard(save)
        save.decide(False, reason)
        if save.publication is None and not given_up:
            self._report_failure(save, reason)

    def _report_failure(self, save: Save, reason: str) -> None:
        """Rank 0 waits for a word: without room for one it gets an empty report, as soon as there is room for that."""
        attempt = save.attempt
        path, text = attempt.report_file(save.rank), json.dumps({"error": reason}).encode()
        deadline = time.monotonic() + self.limit_s
        while not save.cancelled.is_set() and os.path.isdir(attempt.directory) and time.monotonic() < deadline:
            for report in (lambda: write_reserved(path, text), lambda: leave_empty(path)):
                with contextlib.suppress(OSError):
                    report()
                    return
            time.sleep(_POLL_S)

    def _discard(self, save: Save, with_report: bool = False) -> None:
        """Free the space of a save that failed: on rank 0 all of it, elsewhere this rank's files."""
        attempt = save.attempt
        try:
            if is_published(attempt):
                return
            if save.publication is not None:
                discard(attempt.directory, attempt.suffix, attempt.token, self.preparing)
                return
            mine = [os.path.join(attempt.directory, file.name) for file in save.files]
            if with_report:
                mine += [attempt.report_file(save.rank), f"{attempt.report_file(save.rank)}.tmp"]
            for path in mine:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
        except OSError as error:
            logger.warning("%s cannot be deleted: %s", attempt.directory, error)

    def write_files(self, save: Save) -> dict[str, list[dict[str, object]]]:
        """Write this rank's files and its report, which is returned."""
        between = self._watch(save)
        attempt = save.attempt
        if save.publication is None:
            # Rank 0 waits for word of a full disk too.
            reserve(attempt.report_file(save.rank))
        dense: list[FileEntry] = []
        parts: list[tuple[int, int, PartEntry]] = []
        for file in save.files:
            if file.layer is None or file.expert is None:
                dense.append(write_image(attempt.directory, file.name, file.image, between))
            else:
                parts.append((file.layer, file.expert, self._write_record(save, file, between)))
        if save.rest is not None:
            dense.append(write_bytes(attempt.directory, *save.rest))
        for folder in ("experts", "dense"):
            fsync_path(os.path.join(attempt.directory, folder))
        report: dict[str, list[dict[str, object]]] = {
            "dense": [asdict(entry) for entry in dense],
            "parts": [{"layer": layer, "expert": expert, **asdict(part)} for layer, expert, part in parts],
        }
        if save.publication is None:
            write_reserved(attempt.report_file(save.rank), json.dumps(report).encode())
        return report

    def _write_record(self, save: Save, file: PlannedFile, between: Callable[[], None]) -> PartEntry:
        attempt = save.attempt
        return write_part(
            attempt.save_dir,
            attempt.tag,
            file.name,
            file.image,
            step=attempt.step,
            tokens=file.tokens,
            between=between,
        )

    def _watch(self, save: Save) -> Callable[[], None]:
        def between() -> None:
            if save.cancelled.is_set():
                raise Cancelled("given up")
            if self.owner is not None:
                self.owner.beat()

        return between

    # -- rank 0 -------------------------------------------------------------------------------------------------

    def publish(
        self, save: Save, publication: Publication, mine: dict[str, list[dict[str, object]]], deadline: float
    ) -> None:
        """Make the attempt the newest checkpoint. Raises CheckpointError or OSError where that cannot be."""
        attempt = save.attempt
        reports = [mine, *self._collect(save, publication, deadline)]
        manifest = self._complete(attempt, publication, reports)
        for tag, entry, what in manifest.all_files():
            path = os.path.join(attempt.save_dir, tag, entry.name)
            if not os.path.isfile(path) or os.path.getsize(path) != entry.bytes:
                self._forget_base()
                raise CheckpointError(f"{path}, which holds {what}, has been removed or changed")
        for folder in ("experts", "dense", "", ".."):
            fsync_path(os.path.join(attempt.directory, folder))
        if self.owner is not None:
            self.owner.check()
        if not publication.may_publish():
            raise CheckpointError(
                f"{attempt.directory} is not published: a newer generation than {attempt.generation} runs"
            )
        with self._publishing:
            if save.cancelled.is_set():
                raise Cancelled("given up")
            manifest.write(attempt.directory)
            # From here on the checkpoint is complete and nothing of it may be deleted.
            if publication.save_latest:
                self._move_latest(attempt)
            self.newest = attempt.save_dir, manifest
            save.decide(True)
        self._tidy(save, publication)

    def _move_latest(self, attempt: Attempt) -> None:
        try:
            write_atomically(os.path.join(attempt.save_dir, "latest"), attempt.tag.encode())
        except OSError:
            if not attempt.suffix:
                # Not the newest by name, it must not be one at all: the space it takes is of no use.
                os.unlink(os.path.join(attempt.directory, MANIFEST))
            raise

    def _forget_base(self) -> None:
        """What the newest checkpoint names is not there any more: the next save must not refer to it."""
        if self.newest is not None:
            self.broken = os.path.join(self.newest[0], self.newest[1].tag)
            self.newest = None

    def _collect(
        self, save: Save, publication: Publication, deadline: float
    ) -> list[dict[str, list[dict[str, object]]]]:
        between = self._watch(save)
        reports = []
        for rank in range(1, publication.world_size):
            path = save.attempt.report_file(rank)
            while not os.path.exists(path):
                between()
                if time.monotonic() > deadline:
                    raise CheckpointError(f"rank {rank} has not written its part within {self.limit_s:g} s")
                if not os.path.isdir(save.attempt.directory):
                    raise CheckpointError(f"{save.attempt.directory} has been removed")
                time.sleep(_POLL_S)
            with open(path, encoding="utf-8") as file:
                text = file.read()
            if not text:
                raise CheckpointError(f"rank {rank}: No space left on device, not even to say what failed")
            report = json.loads(text)
            if "error" in report:
                raise CheckpointError(report["error"])
            reports.append(report)
        return reports

    def _tidy(self, save: Save, publication: Publication) -> None:
        """Remove what is not needed any more; the checkpoint is complete whether or not that succeeds."""
        attempt = save.attempt
        try:
            for rank in range(1, publication.world_size):
                os.unlink(attempt.report_file(rank))
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(attempt.directory, INCOMPLETE))
            if publication.keep_last is not None:
                arguments = attempt.save_dir, publication.keep_last, attempt.tag, self.active, self.preparing
                for tag in prune(*arguments):
                    logger.info("checkpoint %s retired", os.path.join(attempt.save_dir, tag))
        except OSError as error:
            logger.warning("old files of %s could not be removed: %s", attempt.save_dir, error)

    def _complete(
        self, attempt: Attempt, publication: Publication, reports: list[dict[str, list[dict[str, object]]]]
    ) -> Manifest:
        """The manifest with what the ranks have written, and for the rest what was written before."""
        dense = [FileEntry(**entry) for report in reports for entry in report["dense"]]  # type: ignore[arg-type]
        new: dict[tuple[int, int], list[PartEntry]] = {}
        for entry in (entry for report in reports for entry in report["parts"]):
            fields = {key: value for key, value in entry.items() if key not in ("layer", "expert")}
            place = (int(entry["layer"]), int(entry["expert"]))  # type: ignore[call-overload]
            new.setdefault(place, []).append(PartEntry(**fields))  # type: ignore[arg-type]
        base = base_of(self.newest, attempt.save_dir, attempt.content)
        experts = [
            composed(base.get((layer, expert)), new.get((layer, expert), []), layer, expert)
            for layer, count in enumerate(publication.num_experts)
            for expert in range(count)
        ]
        if missing := [entry.what for entry in experts if not entry.parts]:
            raise CheckpointError(f"{missing[0]} is neither in this save nor in one before it")
        return replace(publication.head, files=sorted(dense, key=lambda entry: entry.name), experts=experts)


def base_of(newest: tuple[str, Manifest] | None, save_dir: str, content: str) -> dict[tuple[int, int], ExpertEntry]:
    """The records that a save in ``save_dir`` may refer to, by (layer, expert)."""
    if newest is None or os.path.realpath(newest[0]) != os.path.realpath(save_dir) or newest[1].content != content:
        return {}
    return {
        (entry.layer, entry.expert): entry
        for entry in newest[1].experts
        # Version 1 did not say which fields a file holds.
        if all(part.fields for part in entry.parts)
    }
