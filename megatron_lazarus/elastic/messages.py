"""Authenticated messages: one JSON object a line, each with an HMAC-SHA256 by the job token.

A connection starts with one random number from either side. They key the code of every later line, together with
the line's direction and number: a line is valid once, in its place, on its connection.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import os
import secrets
import select
import socket
import threading
import time
from typing import Any

Message = dict[str, Any]

MAX_LINE = 1 << 20
"""Bytes a line may have; a longer one ends the connection."""

_GREETING = b"lazarus/1 "
_GREETING_LENGTH = len(_GREETING) + 33
_CODE_LENGTH = 64


class ProtocolError(ConnectionError):
    """The peer sent something that is no message of this job: garbage, a wrong token, or a line out of place."""


class Seal:
    """Makes and checks the lines of one connection. Greet with ``greeting`` first, then give the peer's to ``meet``."""

    def __init__(self, token: str, *, server: bool) -> None:
        if not token:
            raise ValueError("the job token is empty; set LAZARUS_TOKEN")
        self._token, self._server = token.encode(), server
        self._nonce = secrets.token_hex(16).encode()
        self._key = b""
        self._sent = self._received = 0

    @property
    def greeting(self) -> bytes:
        return _GREETING + self._nonce + b"\n"

    def meet(self, greeting: bytes) -> None:
        """Take the peer's greeting; raises ProtocolError if it is none."""
        nonce = greeting.removeprefix(_GREETING).removesuffix(b"\n")
        if len(greeting) != _GREETING_LENGTH or not greeting.startswith(_GREETING) or not nonce.isalnum():
            raise ProtocolError(f"not a lazarus greeting: {greeting[:40]!r}")
        nonces = self._nonce + nonce if self._server else nonce + self._nonce
        self._key = hmac.digest(self._token, nonces, "sha256")

    def _code(self, by_server: bool, number: int, body: bytes) -> bytes:
        place = (b"s" if by_server else b"c") + number.to_bytes(8, "big")
        return hmac.new(self._key, place + body, hashlib.sha256).hexdigest().encode()

    def close(self, message: Message) -> bytes:
        """The line of a message; raises ValueError if it is too long."""
        body = json.dumps(message, separators=(",", ":")).encode()
        line = self._code(self._server, self._sent, body) + b" " + body + b"\n"
        if len(line) > MAX_LINE:
            raise ValueError(f"message of {len(line)} bytes; the limit is {MAX_LINE}")
        self._sent += 1
        return line

    def open(self, line: bytes) -> Message:
        """The message in a line; raises ProtocolError if the peer did not seal it for this place."""
        code, body = line[:_CODE_LENGTH], line[_CODE_LENGTH + 1 : -1]
        if not hmac.compare_digest(code, self._code(not self._server, self._received, body)):
            raise ProtocolError("a line with a wrong authentication code (another job's token?)")
        self._received += 1
        message = json.loads(body)
        if not isinstance(message, dict):
            raise ProtocolError(f"a message must be an object, not {type(message).__name__}")
        return message


class Channel:
    """An authenticated connection of an asyncio program."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seal: Seal) -> None:
        self._reader, self._writer, self._seal = reader, writer, seal
        self.address = str((writer.get_extra_info("peername") or ("?",))[0])
        self.local_address = str((writer.get_extra_info("sockname") or ("?",))[0])
        self.closed_by_peer = False

    @classmethod
    async def connect(cls, host: str, port: int, token: str, limit_s: float) -> Channel:
        """Connect within ``limit_s`` seconds; raises OSError or TimeoutError."""
        # asyncio.wait_for would forget a cancellation that comes together with the result (until Python 3.12).
        async with asyncio.timeout(limit_s):
            return await cls._connect(host, port, token)

    @classmethod
    async def _connect(cls, host: str, port: int, token: str) -> Channel:
        reader, writer = await asyncio.open_connection(host, port, limit=MAX_LINE)
        return await cls._greet(reader, writer, Seal(token, server=False))

    @classmethod
    async def accept(cls, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, token: str) -> Channel:
        return await cls._greet(reader, writer, Seal(token, server=True))

    @classmethod
    async def _greet(cls, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seal: Seal) -> Channel:
        tune(writer.get_extra_info("socket"))
        writer.write(seal.greeting)
        try:
            seal.meet(await reader.readexactly(_GREETING_LENGTH))
        except asyncio.IncompleteReadError as error:
            if not error.partial:
                raise ConnectionResetError("the connection was closed before a greeting") from None
            raise ProtocolError(f"no lazarus greeting, but {error.partial[:40]!r}") from None
        return cls(reader, writer, seal)

    def send(self, message: Message) -> None:
        """Queue a message; a lost connection shows in ``receive``."""
        if not self._writer.is_closing():
            self._writer.write(self._seal.close(message))

    async def receive(self) -> Message | None:
        """The next message, or None at the end of the connection; raises ProtocolError.

        ``closed_by_peer`` then tells whether the peer has ended it, or the network did.
        """
        try:
            line = await self._reader.readuntil()
        except (asyncio.IncompleteReadError, ConnectionResetError, BrokenPipeError):
            self.closed_by_peer = True
            return None
        except OSError:
            return None
        except asyncio.LimitOverrunError:
            raise ProtocolError(f"a line of more than {MAX_LINE} bytes") from None
        return self._seal.open(line)

    async def flush(self) -> None:
        await self._writer.drain()

    def close(self) -> None:
        """What has been sent is still delivered, if the peer takes it."""
        self._writer.close()


class BlockingChannel:
    """An authenticated connection of threads: any may send, one receives."""

    def __init__(self, connection: socket.socket, seal: Seal) -> None:
        self._socket, self._seal = connection, seal
        self._buffer = bytearray()
        self._sending = threading.Lock()
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)

    @classmethod
    def connect(cls, host: str, port: int, token: str, limit_s: float) -> BlockingChannel:
        """Connect within ``limit_s`` seconds; raises OSError (also for a time-out) or ProtocolError."""
        connection = socket.create_connection((host, port), timeout=limit_s)
        channel = cls(connection, Seal(token, server=False))
        try:
            tune(connection)
            connection.sendall(channel._seal.greeting)
            greeting = channel._read_line(time.monotonic() + limit_s)
            if greeting is None:
                # A coordinator that has just died says nothing; that is no refusal.
                raise ConnectionResetError("the connection was closed before a greeting")
            channel._seal.meet(greeting)
        except BaseException:
            connection.close()
            raise
        return channel

    @property
    def inode(self) -> int:
        return os.fstat(self._socket.fileno()).st_ino

    @property
    def local_address(self) -> str:
        return str(self._socket.getsockname()[0])

    def send(self, message: Message) -> None:
        """Send a message; raises OSError if the connection is lost or does not take it within its limit."""
        with self._sending:
            self._socket.sendall(self._seal.close(message))

    def receive(self, limit_s: float) -> Message | None:
        """The next message, or None if none came in time; raises ProtocolError or OSError (connection lost)."""
        line = self._read_line(time.monotonic() + limit_s)
        return None if line is None else self._seal.open(line)

    def _read_line(self, deadline: float) -> bytes | None:
        while (end := self._buffer.find(b"\n")) < 0:
            if len(self._buffer) > MAX_LINE:
                raise ProtocolError(f"a line of more than {MAX_LINE} bytes")
            if not self._poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                return None
            data = self._socket.recv(1 << 16)
            if not data:
                raise ConnectionResetError("the coordinator closed the connection")
            self._buffer += data
        line = bytes(self._buffer[: end + 1])
        del self._buffer[: end + 1]
        return line

    def close(self) -> None:
        self._socket.close()


def tune(connection: socket.socket) -> None:
    """Small messages at once."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def split_address(address: str) -> tuple[str, int]:
    """Host and port of ``HOST:PORT``; raises ValueError."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"address {address!r}; it must be HOST:PORT")
    return host.strip("[]"), int(port)
