"""How nodes that do not know one another meet in a job: through a folder on storage that all of them share.

A run may need several *attempts*: one ends when all its nodes are gone. Every attempt is a file, created atomically by
the node that founds it, with the address at which that node already listens and the attempt's token. Who comes later
joins the newest attempt, at the coordinator that ``job.json`` names: a successor writes its own address there, and
whichever rules touches that file every ``BEAT_S`` seconds. An attempt of which nothing was heard for longer than its
nodes would survive without a coordinator is over, and one of those that wait may found the next. Clocks need not agree.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_lazarus.elastic.journal import JOB_FILE, read_json
from megatron_lazarus.elastic.messages import BlockingChannel, split_address
from megatron_lazarus.elastic.settings import BEAT_S, HANDSHAKE_TIMEOUT_S

logger = logging.getLogger(__name__)

FOLDER = "attempts"
LOOK_S = 0.5
_PREFIX = "attempt-"


@dataclass(frozen=True)
class Meeting:
    """Where to join. ``listener``: of a founder, who has to serve the coordinator there itself."""

    address: str
    token: str
    listener: socket.socket | None = None


class Rendezvous:
    """One node's view. ``own_address``: where others reach it; ``lease_s``: how long nodes live without a coordinator.

    All methods may raise OSError: the storage is out of reach.
    """

    def __init__(
        self,
        log_dir: Path,
        own_address: str,
        lease_s: float,
        port: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._log_dir, self._folder = log_dir, log_dir / FOLDER
        self._own_address, self._port, self._clock = own_address, port, clock
        self._over_s = lease_s + 3 * BEAT_S
        self._seen: Any = None
        self._quiet_s, self._looked_at = 0.0, clock()

    def meet(self, limit_s: float) -> Meeting:
        """Join the newest attempt, or found one. Raises TimeoutError."""
        deadline = self._clock() + limit_s
        while self._clock() < deadline:
            if (meeting := self.look()) is not None:
                return meeting
            time.sleep(LOOK_S)
        raise TimeoutError(f"no coordinator answers by what is in {self._log_dir}, for {limit_s:g} s")

    def look(self) -> Meeting | None:
        """One look; None: neither is possible now."""
        number = self.newest()
        if number:
            attempt = read_json(self._file(number))
            job = read_json(self._log_dir / JOB_FILE)
            if attempt is not None and job is not None and job["token"] == attempt["token"]:
                attempt = job
            if attempt is not None and _answers(attempt):
                return Meeting(str(attempt["coordinator"]), str(attempt["token"]))
            if not self._is_over(number):
                return None
        return self._found(number + 1)

    def newest(self) -> int:
        """Number of the newest attempt; 0: none."""
        names = os.listdir(self._folder) if self._folder.is_dir() else []
        return max((int(name.removeprefix(_PREFIX)) for name in names if name.startswith(_PREFIX)), default=0)

    def _is_over(self, number: int) -> bool:
        """Whether nothing has changed for too long, in looks that succeeded: time in which the storage hung says
        nothing of those who could not write meanwhile."""
        now = self._clock()
        passed, self._looked_at = min(now - self._looked_at, 2 * LOOK_S + HANDSHAKE_TIMEOUT_S), now
        seen = (number, _stamp(self._log_dir / JOB_FILE))
        if seen != self._seen:
            self._seen, self._quiet_s = seen, 0.0
        else:
            self._quiet_s += passed
        return self._quiet_s > self._over_s

    def _found(self, number: int) -> Meeting | None:
        """Found this attempt; None if somebody else was faster."""
        self._folder.mkdir(parents=True, exist_ok=True)
        try:
            listener = socket.create_server((self._own_address, self._port))
        except OSError as error:
            logger.warning("another port than %d for the coordinator: %s", self._port, error)
            listener = socket.create_server((self._own_address, 0))
        host, port = listener.getsockname()[:2]
        address, token = f"{host}:{port}", os.environ.get("LAZARUS_TOKEN") or secrets.token_hex(32)
        draft = self._folder / f".{number}.{secrets.token_hex(8)}"
        # Whoever can read the token can command the job.
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                json.dump({"coordinator": address, "token": token}, file)
                file.flush()
                os.fsync(file.fileno())
            # The one operation that is atomic on every file system.
            os.link(draft, self._file(number))
        except OSError as error:
            listener.close()
            if isinstance(error, FileExistsError):
                return None
            raise
        finally:
            draft.unlink()
        return Meeting(address, token, listener)

    def _file(self, number: int) -> Path:
        return self._folder / f"{_PREFIX}{number:06d}"


def _stamp(path: Path) -> tuple[str, int] | None:
    with contextlib.suppress(FileNotFoundError), path.open(encoding="utf-8") as file:
        # Of the open file: what the name alone says may come from a cache.
        return file.read(), os.fstat(file.fileno()).st_mtime_ns
    return None


def _answers(job: dict[str, Any]) -> bool:
    """Whether its coordinator accepts the token."""
    try:
        address = split_address(str(job["coordinator"]))
        with contextlib.closing(BlockingChannel.connect(*address, str(job["token"]), HANDSHAKE_TIMEOUT_S)) as channel:
            channel.send({"role": "client"})
            return channel.receive(HANDSHAKE_TIMEOUT_S) is not None
    except OSError as error:
        logger.info("no coordinator at %s: %s", job["coordinator"], error)
        return False
