"""One job at a time writes to a checkpoint directory: ``owner.json`` says which.

The owner's file is touched again and again. An owner that does not do so for ``STALE_S``, or whose process is gone
from this host, has crashed, and its place is taken.
"""

from __future__ import annotations

import json
import os
import socket
import time
import uuid
from typing import Any

from megatron_lazarus.checkpoint.files import CheckpointError

NAME = "owner.json"
STALE_S = 60.0
BEAT_S = 5.0


class Owner:
    """The claim of one job, ``job``, on one directory."""

    def __init__(self, save_dir: str, job: str) -> None:
        self.path = os.path.join(save_dir, NAME)
        self.job = job
        self._beaten = 0.0
        self._mine = {
            "job": job,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "process_start": _process_start(os.getpid()),
        }

    def claim(self) -> None:
        """Become the owner. Raises CheckpointError, naming the other job, if there is a living one; OSError."""
        temporary = f"{self.path}.{uuid.uuid4().hex[:8]}"
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(self._mine, file)
        try:
            for _ in range(3):
                try:
                    # Unlike a rename, a link never replaces what another job has put there meanwhile.
                    os.link(temporary, self.path)
                    return
                except FileExistsError:
                    found = self._read()
                    if found is not None and not self._may_replace(found, temporary):
                        raise CheckpointError(self._refusal(found)) from None
                    self._remove(found)
        finally:
            os.unlink(temporary)
        raise CheckpointError(f"{self.path} changes hands again and again: several jobs want to write there")

    def beat(self) -> None:
        """Show that this job lives. Raises CheckpointError if another one has taken the directory; OSError."""
        now = time.monotonic()
        if now - self._beaten < BEAT_S:
            return
        self.check()
        os.utime(self.path)
        self._beaten = now

    def check(self) -> None:
        """Raise CheckpointError if this job is not the owner any more."""
        found = self._read()
        if found is None or found.get("job") != self.job:
            raise CheckpointError(
                f"{self.path} says that job {(found or {}).get('job')} writes here now, not {self.job}"
            )

    def release(self) -> None:
        """Let another job in. Harmless where this one is not the owner."""
        try:
            if self._read() == self._mine:
                os.unlink(self.path)
        except OSError:
            # The directory may be gone; an owner file that stays becomes stale.
            return

    def _read(self) -> dict[str, Any] | None:
        """None if there is none; an unreadable one is as good as one of an unknown job."""
        try:
            with open(self.path, encoding="utf-8") as file:
                found = json.load(file)
            return found if isinstance(found, dict) else {}
        except FileNotFoundError:
            return None
        except ValueError:
            return {}

    def _may_replace(self, found: dict[str, Any], temporary: str) -> bool:
        if found.get("job") == self.job:
            return True
        if found.get("host") == self._mine["host"]:
            return _process_start(int(found.get("pid", 0))) != found.get("process_start") or (
                found.get("pid") == os.getpid()
            )
        return self._age(temporary) > STALE_S

    def _age(self, temporary: str) -> float:
        """Seconds since the owner's last sign of life, by the clock of the file system alone."""
        try:
            return os.stat(temporary).st_mtime - os.stat(self.path).st_mtime
        except FileNotFoundError:
            return STALE_S + 1

    def _remove(self, found: dict[str, Any] | None) -> None:
        """Take the file of a dead owner away, and put it back if meanwhile it is another's."""
        aside = f"{self.path}.{uuid.uuid4().hex[:8]}"
        try:
            os.rename(self.path, aside)
        except FileNotFoundError:
            return
        with open(aside, encoding="utf-8") as file:
            text = file.read()
        try:
            if found is not None and json.loads(text) != found:
                os.link(aside, self.path)
        except (ValueError, FileExistsError):
            # Damaged, or a third job was faster: the next attempt sees what is there.
            pass
        os.unlink(aside)

    def _refusal(self, found: dict[str, Any]) -> str:
        return (
            f"{os.path.dirname(self.path)} belongs to job {found.get('job')} (process {found.get('pid')} on "
            f"{found.get('host')}), which is alive; job {self.job} needs a directory of its own. If that job is gone, "
            f"wait {STALE_S:g} s or remove {self.path}"
        )


def _process_start(pid: int) -> int:
    """When a process of this host was started, in clock ticks since boot; -1 if there is none."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return int(file.read().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return -1
