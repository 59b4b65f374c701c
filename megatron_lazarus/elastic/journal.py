"""What a job leaves behind for tests, reports and scripts: the events file and the completion marker."""

from __future__ import annotations

import json
import logging
import os
import time
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

EVENTS_FILE = "events.jsonl"
RESULT_FILE = "result.json"
JOB_FILE = "job.json"

ENDED_WELL = ("completed", "drained")
"""Statuses of jobs that have not failed; one that was drained resumes from its newest checkpoint."""


class Journal:
    """Appends JSON lines {time (s since 1970), generation, kind, …}; without a folder it only logs them."""

    def __init__(self, folder: Path | None, *, fresh: bool = True) -> None:
        """``fresh``: a new job begins, which has no result yet."""
        self._folder = folder
        self._file = None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            if fresh:
                (folder / RESULT_FILE).unlink(missing_ok=True)
            self._file = (folder / EVENTS_FILE).open("a", encoding="utf-8", buffering=1)

    def event(self, generation: int, kind: str, **fields: Any) -> None:
        entry = {"time": time.time(), "generation": generation, "kind": kind, **fields}
        logger.info("%s", " ".join(f"{key}={value}" for key, value in entry.items() if key != "time"))
        if self._file is not None:
            self._file.write(json.dumps(entry) + "\n")

    def result(self, result: dict[str, Any]) -> None:
        """Publish the completion marker, whole or not at all."""
        if self._folder is not None:
            write_json(self._folder / RESULT_FILE, result)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a file; None if there is none."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None


def write_json(path: Path, value: dict[str, Any], mode: int = 0o644) -> None:
    """Replace a file atomically."""
    draft = path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(value, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
