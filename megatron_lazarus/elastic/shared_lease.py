"""A coordinator's right to rule as a file on shared storage: for two nodes, or when half of them go at once.

Every term is a file, created atomically by whoever takes it; the newest term rules. Its holder writes a new count into
it before ``duration_s`` has passed since the last one, within half of that time, or never again. So when others have
seen no change for one and a half times as long, none will come, and one of them may take the next term. Clocks need
not agree, only run alike. The storage must show a file's new contents to whoever opens it (NFS does).
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import time
from collections.abc import Callable
from pathlib import Path


class SharedLease:
    """One process's view of a job's lease, in a folder of its own below ``folder``. All methods but ``holds`` may raise
    OSError."""

    def __init__(
        self, folder: Path, token: str, duration_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._folder = folder / f"lazarus-{hashlib.sha256(token.encode()).hexdigest()[:16]}"
        self._duration_s, self._clock = duration_s, clock
        self._count = 0
        self.valid_until = -math.inf
        self._seen: tuple[int, bytes] | None = None
        self._seen_at = 0.0

    def holds(self, now: float) -> bool:
        """Whether this process may rule."""
        return now < self.valid_until

    def newest(self) -> int:
        """The term that has been taken last; 0: none, the job has not begun or has ended."""
        names = os.listdir(self._folder) if self._folder.is_dir() else []
        return max((int(name[5:]) for name in names if name.startswith("term-")), default=0)

    def is_vacant(self) -> bool:
        """Whether the newest term's holder has stopped; to be asked again and again, since it takes time to see."""
        term = self.newest()
        seen = (term, self._file(term).read_bytes() if term else b"")
        if seen != self._seen:
            self._seen, self._seen_at = seen, self._clock()
        return not term or self._clock() - self._seen_at > 1.5 * self._duration_s

    def take(self, term: int) -> bool:
        """Take the term after the newest, which is vacant; False if somebody else was faster."""
        began = self._clock()
        self._folder.mkdir(parents=True, exist_ok=True)
        draft = self._folder / f".{term}.{os.uname().nodename}.{os.getpid()}"
        draft.write_bytes(b"0")
        try:
            # The one operation that is atomic on every file system.
            os.link(draft, self._file(term))
        except FileExistsError:
            return False
        finally:
            draft.unlink()
        self.valid_until = began + self._duration_s
        return True

    def renew(self, term: int) -> bool:
        """Hold the term for another ``duration_s``. False if it has run out, also by this having taken too long."""
        began = self._clock()
        if not self.holds(began) or self.newest() != term:
            self.valid_until = -math.inf
            return False
        self._count += 1
        # In place: another file under this name could be hidden by a cache of the folder.
        with self._file(term).open("r+b") as file:
            file.write(f"{self._count} of process {os.getpid()}\n".encode())
            file.flush()
            os.fsync(file.fileno())
        if self._clock() - began > self._duration_s / 2:
            self.valid_until = -math.inf
            return False
        self.valid_until = began + self._duration_s
        return True

    def release(self) -> None:
        """The job has ended: remove all terms, if this process still rules."""
        if not self.holds(self._clock()):
            return
        for name in os.listdir(self._folder):
            (self._folder / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            # Somebody may be about to look into it.
            self._folder.rmdir()

    def _file(self, term: int) -> Path:
        return self._folder / f"term-{term:08d}"
