"""Shows on stdout what rank 0 of a job writes to its log file, whichever node that is."""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from pathlib import Path

from megatron_lazarus.elastic.journal import EVENTS_FILE

logger = logging.getLogger(__name__)

LOOK_INTERVAL_S = 0.2
MEASURE_INTERVAL_S = 5.0
STOP_LIMIT_S = 5.0


class Follower(threading.Thread):
    """Until a generation says which node comes first, it is ``node``. Needs the log files of all nodes in reach.

    A thread, and not waited for in the end: a terminal that takes no output must not make this node look dead.
    """

    def __init__(self, log_dir: Path, node: str) -> None:
        super().__init__(name="lazarus-follower", daemon=True)
        self._log_dir, self._node = log_dir, node
        self._ended = threading.Event()
        self._sizes: dict[Path, int] = {}
        self._measured = 0.0
        self._measure()
        self._position = self._sizes.get(self._log(node), 0)
        self._events = log_dir / EVENTS_FILE
        self._events_read = self._events.stat().st_size if self._events.exists() else 0

    def run(self) -> None:
        try:
            while not self._ended.wait(LOOK_INTERVAL_S):
                self._look()
            self._look()
        except OSError:
            logger.exception("no more of rank 0's output is shown; it is in %s", self._log(self._node))

    def stop(self) -> None:
        """Show what is left."""
        self._ended.set()
        self.join(STOP_LIMIT_S)

    def _look(self) -> None:
        self._copy()
        for node in self._new_first_nodes():
            if node != self._node:
                self._copy()
                self._node = node
                # From before it became rank 0: rather a line too much than one too few.
                self._position = self._sizes.get(self._log(node), 0)
                self._copy()
        if time.monotonic() - self._measured > MEASURE_INTERVAL_S:
            self._measure()

    def _log(self, node: str) -> Path:
        return self._log_dir / f"{node}.0.log"

    def _measure(self) -> None:
        self._sizes = {path: path.stat().st_size for path in self._log_dir.glob("*.0.log")}
        self._measured = time.monotonic()

    def _new_first_nodes(self) -> list[str]:
        """The first node of every generation since the last call."""
        if not self._events.exists():
            return []
        with self._events.open("rb") as file:
            file.seek(self._events_read)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._events_read += len(whole)
        entries = [json.loads(line) for line in whole.splitlines()]
        return [str(entry["nodes"][0]) for entry in entries if entry["kind"] == "generation"]

    def _copy(self) -> None:
        path = self._log(self._node)
        if not path.exists():
            return
        with path.open("rb") as file:
            file.seek(self._position)
            while data := file.read(1 << 16):
                self._position += len(data)
                sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
