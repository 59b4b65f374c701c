"""A file for a child's output that is never on a disk, so nothing is left however a test session ends."""

from __future__ import annotations

import fcntl
import os
import time


class MemoryFile:
    """An anonymous file whose writers append; the reader's position does not move theirs."""

    def __init__(self, name: str) -> None:
        self.descriptor = os.memfd_create(name)
        fcntl.fcntl(self.descriptor, fcntl.F_SETFL, os.O_APPEND)

    def read(self) -> str:
        return os.pread(self.descriptor, os.fstat(self.descriptor).st_size, 0).decode(errors="replace")

    def clear(self) -> None:
        os.ftruncate(self.descriptor, 0)

    def wait_until_quiet(self, limit: float) -> None:
        """Until something has been written and no more comes, at most ``limit`` seconds."""
        deadline = time.monotonic() + limit
        size = 0
        while time.monotonic() < deadline:
            time.sleep(0.1)
            before, size = size, os.fstat(self.descriptor).st_size
            if size and size == before:
                return

    def close(self) -> None:
        os.close(self.descriptor)
