"""The worker's thread that stays in contact with the coordinator while the main thread computes or is blocked.

It sends heartbeats, hands replies over, frees a main thread that is stuck in a broken generation, writes stacks when
asked, and ends the process when it is no longer part of the job.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from megatron_lazarus.elastic.messages import BlockingChannel, Message, ProtocolError
from megatron_lazarus.elastic.settings import EXIT_EVICTED, EXIT_LEASE, ElasticConfig

logger = logging.getLogger(__name__)

UNBLOCK_INTERVAL_S = 0.05
RECONNECT_INTERVAL_S = 0.1

Connect = Callable[[float, Message], tuple[BlockingChannel, Message]]
"""Connects within so many seconds and says hello, with where the worker stands: (channel, the coordinator's answer).

Raises OSError.
"""


class Watchdog(threading.Thread):
    """One per worker. ``unblock(generation)`` is called again and again while that generation is broken."""

    def __init__(
        self, name: str, connect: Connect, start_limit_s: float, is_replaced: Callable[[], bool] = lambda: False
    ) -> None:
        """``is_replaced`` tells whether there is a later coordinator than the one connected to."""
        super().__init__(name="lazarus-watchdog", daemon=True)
        self._name, self._connect, self._is_replaced = name, connect, is_replaced
        self.generation = self._built = 0
        self._progress: tuple[int, str, int, float] = (-1, "start", 0, time.monotonic())
        self._channel, welcome = self._first_contact(start_limit_s)
        self.config = ElasticConfig(**welcome["welcome"])
        self.coordinator_host = str(welcome["host"])
        self.local_address = self._channel.local_address
        self.unblock: Callable[[int], None] = lambda generation: None
        self.changed = threading.Condition()
        self.broken = 0
        self.broken_why = ""
        self.pending: Message = {"join": [], "drain": {}}
        self.result: dict[str, Any] | None = None
        self._sending = threading.Lock()
        self._unsure: list[tuple[int, Message]] = []
        self._asked: dict[int, Message] = {}
        self._replies: dict[int, Message] = {}
        self._requests = 0
        self._beats = 0
        self._contact = time.monotonic()
        self._released = self._closed = False
        self.drain_asked = False

    def _first_contact(self, limit_s: float) -> tuple[BlockingChannel, Message]:
        deadline = time.monotonic() + limit_s
        while True:
            try:
                return self._connect(max(0.1, deadline - time.monotonic()), self._standing)
            except OSError as error:
                if time.monotonic() > deadline or isinstance(error, ProtocolError):
                    raise
                time.sleep(0.1)

    # -- for the main thread ------------------------------------------------------------------------------------

    def note(self, step: int, phase: str, collective: int) -> None:
        self._progress = (step, phase, collective, time.monotonic())

    @property
    def step(self) -> int:
        return self._progress[0]

    @property
    def place(self) -> str:
        step, phase, collective, _ = self._progress
        return f"{self._name}, generation {self.generation}, step {step}, {phase}, collective {collective}"

    @property
    def _standing(self) -> Message:
        return {"generation": self.generation, "built": self._built, "step": self.step}

    def tell(self, message: Message) -> None:
        """Send without waiting for an answer. What a coordinator may not have heard, its successor hears."""
        with self._sending:
            if message["do"] == "built":
                self._built = int(message["generation"])
            self._unsure.append((self._beats, message))
            self._send(message)

    def _send(self, message: Message) -> None:
        try:
            self._channel.send(message)
        except OSError as error:
            logger.warning("%s: could not send %r: %s", self.place, message["do"], error)

    def ask(self, message: Message, timeout_s: float) -> Message:
        """Send and wait for the answer, or for the end of the job ({"ended": result}). Raises TimeoutError."""
        with self.changed:
            self._requests += 1
            number = self._requests
        with self._sending:
            self._asked[number] = {"id": number, **message}
            self._send(self._asked[number])
        with self.changed:
            answered = self.changed.wait_for(lambda: number in self._replies or self.result is not None, timeout_s)
            reply = self._replies.pop(number, None)
        with self._sending:
            del self._asked[number]
        if not answered:
            raise TimeoutError(f"{self.place}: no answer to {message['do']!r} within {timeout_s:g} s")
        return reply if reply is not None else {"ended": self.result}

    def release(self) -> None:
        """From now on the process is no longer watched: it has left, or the job is done."""
        self._released = True

    def stop(self) -> None:
        self._released = self._closed = True
        if self is not threading.current_thread() and self.is_alive():
            self.join(timeout=5)
        self._channel.close()

    # -- the thread ---------------------------------------------------------------------------------------------

    def run(self) -> None:
        interval = self.config.heartbeat_interval_s
        next_beat = 0.0
        while not self._closed:
            now = time.monotonic()
            if now >= next_beat:
                self._beat()
                next_beat = now + interval
            # A main thread that builds its group opens new connections meanwhile.
            self._free_main()
            try:
                pause = next_beat - time.monotonic()
                message = self._channel.receive(max(0.0, min(pause, UNBLOCK_INTERVAL_S) if self.is_broken else pause))
                while message is not None:
                    self._handle(message)
                    message = self._channel.receive(0.0)
            except OSError as error:
                self._reconnect(error)
            if time.monotonic() - self._contact > self.config.heartbeat_timeout_s and self._is_replaced():
                self._reconnect(TimeoutError("there is another one"))
            # After a pause of the whole process, what has arrived meanwhile is read before the lease is looked at.
            if time.monotonic() - self._contact > self.config.lease_s:
                self._exit(EXIT_LEASE, f"no contact with the coordinator for {self.config.lease_s:g} s (lease_s)")

    def _beat(self) -> None:
        step, phase, collective, since = self._progress
        beat = {"step": step, "phase": phase, "collective": collective, "age_s": round(time.monotonic() - since, 3)}
        with self._sending:
            self._beats += 1
            self._send({"do": "heartbeat", "number": self._beats, **beat})
        if self.drain_asked:
            self.drain_asked = False
            self.tell({"do": "drain"})

    def _handle(self, message: Message) -> None:
        self._contact = time.monotonic()
        if "ack" in message:
            # What was sent before that heartbeat has been heard.
            with self._sending:
                self._unsure = [entry for entry in self._unsure if entry[0] >= int(message["ack"])]
            return
        if "re" in message:
            with self.changed:
                if "generation" in message:
                    self.generation = int(message["generation"])
                    self.pending = {"join": [], "drain": {}}
                self._replies[int(message["re"])] = message
                self.changed.notify_all()
        elif "refused" in message:
            self._exit(EXIT_EVICTED, f"refused: {message['refused']}")
        elif message["push"] == "evicted":
            self._exit(EXIT_EVICTED, f"declared dead: {message['why']}")
        elif message["push"] == "dump":
            self._dump("the coordinator asked for it")
        elif message["push"] == "pending":
            self.pending = message
        elif message["push"] == "broken":
            self.broken, self.broken_why = int(message["generation"]), str(message["why"])
        elif message["push"] == "ended":
            with self.changed:
                self.result = dict(message["result"])
                self.changed.notify_all()

    @property
    def is_broken(self) -> bool:
        return self.broken > 0 and self.broken == self.generation

    def _free_main(self) -> None:
        if self.is_broken:
            self.unblock(self.broken)

    def _reconnect(self, error: OSError) -> None:
        """The connection is lost: try until the lease runs out."""
        if self._released:
            self._closed = True
            return
        logger.error("%s: lost the coordinator: %s", self.place, error)
        self._channel.close()
        while time.monotonic() - self._contact <= self.config.lease_s:
            try:
                channel, welcome = self._connect(self.config.heartbeat_timeout_s, self._standing)
                self._go_on_with(channel, welcome)
                return
            except ProtocolError as refusal:
                self._exit(EXIT_EVICTED, str(refusal))
            except OSError:
                self._free_main()
                time.sleep(RECONNECT_INTERVAL_S)

    def _go_on_with(self, channel: BlockingChannel, welcome: Message) -> None:
        """Tell a coordinator what the one before may not have heard, and ask what that has not answered."""
        with self._sending:
            self._channel, self._contact = channel, time.monotonic()
            self.coordinator_host = str(welcome["host"])
            for message in [*(message for _, message in self._unsure), *self._asked.values()]:
                self._send(message)
        logger.warning("%s: goes on with the coordinator of term %s", self.place, welcome["term"])

    def _dump(self, why: str) -> None:
        sys.stderr.write(f"{self.place}: stacks of all threads ({why}):\n")
        sys.stderr.flush()
        faulthandler.dump_traceback(sys.stderr, all_threads=True)

    def _exit(self, code: int, why: str) -> None:
        if self._released:
            self._closed = True
            return
        sys.stderr.write(f"{self.place}: this worker stops itself: {why}\n")
        sys.stderr.flush()
        # The main thread may be blocked in a collective: nothing else than this ends the process for sure.
        os._exit(code)
