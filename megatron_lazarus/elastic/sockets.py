"""Frees a thread that is blocked in a gloo collective by shutting the connections of its group down.

Gloo has no abort: a collective with a peer that hangs ends at the group's time-out, and so does the destruction of
the group. Shutting its connections makes both return at once, but for what ``waiting.py`` is about. It also frees the
peers that wait for this rank. A hack, kept in this file.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading
from collections.abc import Callable, Iterator


class GroupSockets:
    """The connections opened within ``recording()``, which is used while process groups are made.

    ``spared`` gives the inodes of those that other threads may have opened meanwhile: they are left alone.
    """

    def __init__(self, spared: Callable[[], set[int]] = set) -> None:
        self._spared = spared
        self._lock = threading.Lock()
        self._inodes: set[int] = set()
        self._before: set[int] | None = None

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        with self._lock:
            self._before = set(_socket_inodes())
        try:
            yield
        finally:
            with self._lock:
                self._inodes |= set(_socket_inodes()) - self._before
                self._before = None

    def forget(self) -> None:
        with self._lock:
            self._inodes.clear()

    def shut(self) -> int:
        """Shut them down, from any thread; returns how many."""
        with self._lock:
            sockets = _socket_inodes()
            wanted = self._inodes if self._before is None else self._inodes | (set(sockets) - self._before)
            wanted = wanted & set(sockets) - self._spared()
            return sum(_shut(sockets[inode], inode) for inode in wanted)


def _socket_inodes() -> dict[int, int]:
    """Inode -> descriptor of every socket of this process."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found[status.st_ino] = int(name)
    return found


def _shut(descriptor: int, inode: int) -> bool:
    # A copy: between the look and the blow the number may come to mean another file.
    try:
        with socket.socket(fileno=os.dup(descriptor)) as copy:
            if os.fstat(copy.fileno()).st_ino != inode or copy.type != socket.SOCK_STREAM:
                return False
            # Listening sockets have no peer. Shut, they would make gloo end the process.
            copy.getpeername()
            copy.shutdown(socket.SHUT_RDWR)
            return True
    except OSError:
        return False
