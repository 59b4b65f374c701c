"""Sealed lines and the connections that carry them."""

from __future__ import annotations

import asyncio
import threading

import pytest

from megatron_lazarus.elastic.messages import MAX_LINE, BlockingChannel, Channel, ProtocolError, Seal, split_address


def pair(token: str = "token", other: str = "token") -> tuple[Seal, Seal]:
    client, server = Seal(token, server=False), Seal(other, server=True)
    client.meet(server.greeting)
    server.meet(client.greeting)
    return client, server


def test_both_directions() -> None:
    client, server = pair()
    for number in range(3):
        assert server.open(client.close({"number": number})) == {"number": number}
        assert client.open(server.close({"answer": number})) == {"answer": number}


def test_a_line_is_valid_once_in_its_place_and_direction() -> None:
    client, server = pair()
    first, second = client.close({"a": 1}), client.close({"a": 2})
    with pytest.raises(ProtocolError):
        server.open(second)
    assert server.open(first) == {"a": 1}
    with pytest.raises(ProtocolError):
        server.open(first)
    # A line sent back to its sender is not one of the peer's.
    with pytest.raises(ProtocolError):
        client.open(first)
    _, another = pair()
    with pytest.raises(ProtocolError):
        another.open(first)


@pytest.mark.parametrize(
    "change", [lambda line: b"0" + line[1:], lambda line: line.replace(b"1", b"2"), lambda _: b"x\n"]
)
def test_a_changed_line_is_refused(change: object) -> None:
    client, server = pair()
    line = client.close({"value": "one"})
    changed = change(line)  # type: ignore[operator]
    if changed != line:
        with pytest.raises(ProtocolError):
            server.open(changed)


def test_another_token_is_refused() -> None:
    client, server = pair("token", "other")
    with pytest.raises(ProtocolError, match="another job's token"):
        server.open(client.close({}))
    with pytest.raises(ValueError, match="LAZARUS_TOKEN"):
        Seal("", server=True)


def test_too_long_messages_are_not_sent() -> None:
    with pytest.raises(ValueError, match="the limit is"):
        pair()[0].close({"x": "y" * MAX_LINE})


@pytest.mark.parametrize("greeting", [b"GET / HTTP/1.0\r\n", b"", b"lazarus/1 short\n", b"lazarus/1 " + b"\0" * 33])
def test_other_greetings_are_refused(greeting: bytes) -> None:
    with pytest.raises(ProtocolError):
        Seal("token", server=True).meet(greeting)


def test_a_thread_talks_to_an_asyncio_server() -> None:
    async def serve() -> list[object]:
        got: list[object] = []
        done = asyncio.Event()

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            channel = await Channel.accept(reader, writer, "token")
            while (message := await channel.receive()) is not None:
                got.append(message)
                channel.send({"echo": message})
            channel.close()
            done.set()

        server = await asyncio.start_server(connected, "127.0.0.1", 0, limit=MAX_LINE)
        port = server.sockets[0].getsockname()[1]
        thread = threading.Thread(target=client, args=(port,))
        thread.start()
        async with asyncio.timeout(10):
            await done.wait()
        thread.join(10)
        server.close()
        return got

    answers: list[object] = []

    def client(port: int) -> None:
        channel = BlockingChannel.connect("127.0.0.1", port, "token", 5)
        assert channel.receive(0.01) is None
        for number in range(2):
            channel.send({"number": number, "long": "x" * 200_000})
        answers.extend(channel.receive(5) for _ in range(2))
        channel.close()

    assert [message["number"] for message in asyncio.run(serve())] == [0, 1]  # type: ignore[index]
    assert [answer["echo"]["number"] for answer in answers] == [0, 1]  # type: ignore[index]


def test_addresses() -> None:
    assert split_address("host:1") == ("host", 1)
    assert split_address("[::1]:65535") == ("::1", 65535)
    for wrong in ("host", ":1", "host:", "host:65536", "host:x"):
        with pytest.raises(ValueError, match="HOST:PORT"):
            split_address(wrong)


@pytest.mark.parametrize("turns", range(8))
def test_a_cancellation_is_not_lost_with_the_result(monkeypatch: pytest.MonkeyPatch, turns: int) -> None:
    """Whatever turn of the loop it comes in: an agent that went on after it would keep its process from ending."""

    async def run() -> None:
        gate = asyncio.Event()

        async def refused(*_: object) -> Channel:
            await gate.wait()
            raise ConnectionRefusedError

        monkeypatch.setattr(Channel, "_connect", refused)
        task = asyncio.ensure_future(Channel.connect("127.0.0.1", 1, "token", 60.0))
        await asyncio.sleep(0.01)
        gate.set()
        for _ in range(turns):
            await asyncio.sleep(0)
        in_time = task.cancel()
        with pytest.raises(asyncio.CancelledError if in_time else ConnectionRefusedError):
            await task

    asyncio.run(run())
