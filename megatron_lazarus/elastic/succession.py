"""An agent's part in replacing a coordinator that is lost: asks other agents, answers them, hosts the new one.

Agents talk to each other, and workers to their agent, through a port of the agent (``messages.py``, the job's token).
The rules are in ``election.py``.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron_lazarus.elastic.election import Ballot, Charter, Voter
from megatron_lazarus.elastic.messages import MAX_LINE, Channel, Message, ProtocolError, split_address
from megatron_lazarus.elastic.processes import start_process
from megatron_lazarus.elastic.settings import HANDSHAKE_TIMEOUT_S, ElasticConfig
from megatron_lazarus.elastic.shared_lease import SharedLease

logger = logging.getLogger(__name__)

ASK_LIMIT_S = 1.0
"""How long another agent may take to answer."""

PATIENCE_S = 2.0
"""How long who has given a vote leaves the candidate time to become a coordinator before another one is considered."""

STAGGER_S, LONGEST_STAGGER_S = 0.2, 2.0
"""Candidates stand one after another, in the charter's order, so that votes are not split."""

Ruler = tuple[int, str]
"""A coordinator: its term and its HOST:PORT."""

_COORDINATOR = "megatron_lazarus.elastic.coordinator"


class Succession:
    """``orphaned`` tells whether this agent has lost its coordinator; ``log_dir`` is for the one it may host."""

    def __init__(
        self,
        node: str,
        incarnation: str,
        token: str,
        orphaned: Callable[[], bool],
        log_dir: Path | None,
    ) -> None:
        self.node, self._token, self._orphaned, self._log_dir = node, token, orphaned, log_dir
        self.ballot = Ballot(incarnation)
        self.followed: Ruler | None = None
        self.coordinator: asyncio.subprocess.Process | None = None
        self.is_over = False
        self._announced: Ruler | None = None
        self._avoided: Ruler | None = None
        self._hosted: str | None = None
        self._patient_until = 0.0
        self._dead: set[str] = set()
        self._lease: SharedLease | None = None
        self._listener: socket.socket | None = None
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Future[Any]] = set()

    # -- the port -----------------------------------------------------------------------------------------------

    def open(self, address: str) -> None:
        """Listen on the interface with this address; once."""
        if self._listener is None:
            self._listener = socket.create_server((address, 0))

    @property
    def address(self) -> str:
        assert self._listener is not None
        host, port = self._listener.getsockname()[:2]
        return f"{host}:{port}"

    @property
    def port(self) -> int:
        return split_address(self.address)[1]

    async def serve(self) -> None:
        self._server = await asyncio.start_server(self._connected, sock=self._listener, limit=MAX_LINE)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._server is not None:
            self._server.close()
        elif self._listener is not None:
            self._listener.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                channel = await Channel.accept(reader, writer, self._token)
                request = await channel.receive()
            if request is not None:
                channel.send(self._answer(request))
                async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                    await channel.flush()
        except (ProtocolError, KeyError, TypeError, ValueError, asyncio.TimeoutError) as error:
            logger.warning("node %s: refused a request: %s: %s", self.node, type(error).__name__, error)
        except OSError as error:
            logger.info("node %s: lost who asked: %s", self.node, error)
        finally:
            self._tasks.discard(task)
            writer.close()

    def _answer(self, request: Message) -> Message:
        granted = False
        if request["do"] == "vote":
            free = not self._is_patient or request["candidate"] == self.ballot.voted_for
            granted = self.ballot.grant(request, free and self._orphaned())
            if granted and not request["trial"]:
                self._patient_until = time.monotonic() + PATIENCE_S
                logger.warning("node %s: votes for %s in term %d", self.node, request["candidate"], request["term"])
        elif request["do"] == "announce":
            self._announced = (int(request["term"]), str(request["address"]))
        elif request["do"] != "who":
            raise ProtocolError(f"unknown request {request['do']!r}")
        charter = None if self.ballot.charter is None else self.ballot.charter.to_json()
        return {"granted": granted, "followed": self.followed, "charter": charter}

    # -- a new coordinator --------------------------------------------------------------------------------------

    def follow(self, term: int, address: str) -> bool:
        """Whether the agent may follow this coordinator, which is then who others are pointed to."""
        if not self.ballot.follow(term):
            return False
        self.followed = (term, address)
        self._lease, self._patient_until = None, 0.0
        if self.coordinator is not None and self._hosted != address and self.coordinator.returncode is None:
            # Its term is over.
            self.coordinator.kill()
        return True

    @property
    def _is_patient(self) -> bool:
        return time.monotonic() < self._patient_until and self.ballot.voted_for not in self._dead

    @property
    def was_announced(self) -> bool:
        """Whether another agent has told of a coordinator later than ours."""
        return self._is_later(self._announced)

    def _is_later(self, ruler: Ruler | None) -> bool:
        before = 0 if self.followed is None else self.followed[0]
        return ruler is not None and ruler[0] > before and ruler != self._avoided

    def avoid(self, address: str) -> None:
        """Nobody listens at this coordinator's address any more."""
        if self._announced is not None and self._announced[1] == address:
            self._avoided, self._announced = self._announced, None

    @property
    def delay_s(self) -> float:
        """How long to wait for candidates that come before this one."""
        charter = self.ballot.charter
        listed = [] if charter is None else [voter.incarnation for voter in charter.voters]
        position = listed.index(self.ballot.incarnation) if self.ballot.incarnation in listed else len(listed)
        return min(STAGGER_S * position, LONGEST_STAGGER_S)

    @property
    def hindrance(self) -> str | None:
        """Why there can be no other coordinator any more; None if there can."""
        charter = self.ballot.charter
        if charter is None:
            return "it has been lost before the first generation"
        if self.is_over:
            return "the job's lease is gone: it has ended"
        if self._lease is None and charter.is_hopeless(self._dead):
            left = sum(voter.incarnation not in self._dead for voter in charter.voters)
            return (
                f"{left} of {len(charter.voters)} agents are left, and more than half must agree on another one (or "
                'set "lazarus.elastic.lease_path" to a folder on shared storage)'
            )
        return None

    async def attempt(self, config: ElasticConfig) -> Ruler | None:
        """Find a later coordinator, or become host of one; None if neither succeeds this time."""
        charter = self.ballot.charter
        if self.was_announced:
            return self._announced
        if charter is None:
            return None
        candidate = charter.lists(self.ballot.incarnation) and not self._is_patient
        votes = await self._ask(self.ballot.request(trial=True) if candidate else {"do": "who"})
        if self.was_announced or not candidate:
            return self._announced if self.was_announced else None
        if config.lease_path is not None:
            return await self._take_lease(config, Path(config.lease_path))
        assert self.ballot.charter is not None
        # Meanwhile this agent may have given its own vote.
        if self._is_patient or not self.ballot.charter.elects(votes):
            return None
        request = self.ballot.request(trial=False)
        self._patient_until = time.monotonic() + PATIENCE_S
        votes = await self._ask(request)
        # Votes were given for what the request says.
        same = self.ballot.charter.age == Charter.from_json(request["charter"]).age
        if same and self.ballot.term == request["term"] and self.ballot.charter.elects(votes):
            return await self._start(config, request["term"], None)
        self._patient_until = 0.0
        return None

    async def _ask(self, request: Message) -> set[str]:
        """Ask all agents at once; returns who granted, this one included, as soon as they are enough."""
        assert self.ballot.charter is not None
        asked = {
            asyncio.ensure_future(self._ask_one(voter, request)): incarnation
            for incarnation, voter in self.ballot.charter.everybody.items()
            if incarnation != self.ballot.incarnation
        }
        votes, pending = {self.ballot.incarnation}, set(asked)
        try:
            # Those that are cut off do not answer; each may take its whole limit.
            while pending and not (self.was_announced or self.ballot.charter.elects(votes)):
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                votes |= {asked[task] for task in done if self._learn(task.result())}
        finally:
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
        return votes

    def _learn(self, answer: Message | None) -> bool:
        """Keep what another agent tells; returns whether it gives its vote."""
        if answer is None:
            return False
        if answer["charter"] is not None:
            self.ballot.hold(Charter.from_json(answer["charter"]))
        if answer["followed"] is not None:
            followed = (int(answer["followed"][0]), str(answer["followed"][1]))
            if self._is_later(followed) and followed > (self._announced or (0, "")):
                self._announced = followed
        return bool(answer["granted"])

    async def _ask_one(self, voter: Voter, request: Message) -> Message | None:
        try:
            channel = await Channel.connect(voter.address, voter.port, self._token, ASK_LIMIT_S)
        except ConnectionRefusedError:
            # Nobody listens there any more: its process has ended.
            self._dead.add(voter.incarnation)
            return None
        except (OSError, asyncio.TimeoutError) as error:
            logger.info("node %s does not reach node %s: %s", self.node, voter.node, error)
            return None
        try:
            channel.send(request)
            async with asyncio.timeout(ASK_LIMIT_S):
                return await channel.receive()
        except (OSError, asyncio.TimeoutError) as error:
            logger.info("node %s gets no answer from node %s: %s", self.node, voter.node, error)
            return None
        finally:
            channel.close()

    async def _take_lease(self, config: ElasticConfig, folder: Path) -> Ruler | None:
        if self._lease is None:
            self._lease = SharedLease(folder, self._token, config.heartbeat_timeout_s)
        try:
            if not await asyncio.to_thread(self._lease.is_vacant):
                return None
            newest = self._lease.newest()
            self.is_over = not newest
            if self.is_over or not await asyncio.to_thread(self._lease.take, newest + 1):
                return None
        except OSError as error:
            logger.error("node %s: the lease in %s: %s", self.node, folder, error)
            return None
        return await self._start(config, newest + 1, self._lease.valid_until)

    async def found(self, config: ElasticConfig, listener: socket.socket) -> None:
        """Start the job's first coordinator here; its term is the first, unless it finds a lease of an earlier one."""
        await self._serve_at(listener, config, [])

    async def _serve_at(self, listener: socket.socket, config: ElasticConfig, options: Sequence[str]) -> str:
        """Returns the address."""
        host, port = listener.getsockname()[:2]
        given = ["--listen-fd", str(listener.fileno()), "--settings", json.dumps(config.to_json()), *options]
        given += [] if self._log_dir is None else ["--log-dir", str(self._log_dir)]
        try:
            self.coordinator = await self.spawn(given, listener.fileno())
        finally:
            listener.close()
        self._hosted = f"{host}:{port}"
        return self._hosted

    async def _start(self, config: ElasticConfig, term: int, lease_until: float | None) -> Ruler:
        """Start the coordinator of that term here, and tell the others."""
        charter = self.ballot.charter
        assert charter is not None
        given = {"term": term, "charter": charter.to_json(), "dead": sorted(self._dead), "lease_until": lease_until}
        address = await self._serve_at(self._socket_for_coordinator(), config, ["--succession", json.dumps(given)])
        ruler = (term, address)
        logger.warning("node %s: hosts the coordinator of term %d at %s", self.node, *ruler)
        for voter in charter.everybody.values():
            if voter.incarnation != self.ballot.incarnation:
                request = {"do": "announce", "term": term, "address": ruler[1]}
                task = asyncio.ensure_future(self._ask_one(voter, request))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        return ruler

    def _socket_for_coordinator(self) -> socket.socket:
        """On the port of the one before, which firewalls let through, if this host has it free."""
        host = split_address(self.address)[0]
        if self.followed is not None:
            try:
                return socket.create_server((host, split_address(self.followed[1])[1]))
            except OSError as error:
                logger.info("node %s: another port for the coordinator: %s", self.node, error)
        return socket.create_server((host, 0))

    async def spawn(self, options: Sequence[str], descriptor: int) -> asyncio.subprocess.Process:
        """Start a coordinator process with these options, which inherits the descriptor and dies with this one."""
        log = None if self._log_dir is None else self._log_dir / f"coordinator-{self.node}.log"
        command = [sys.executable, "-m", _COORDINATOR, *options]
        environment = {**os.environ, "LAZARUS_TOKEN": self._token}
        return await start_process(command, environment, log, descriptors=(descriptor,))
