"""Notices of the clouds, asked from a metadata server that insists on their rules."""

from __future__ import annotations

import os
import signal
import socket
import threading
import urllib.error

import pytest

from megatron_lazarus.elastic import spot
from megatron_lazarus.elastic.spot import CLOUDS, SpotWatch
from tests.elastic.metadata import ACTION_PATH, TOKEN_PATH, metadata_server

NOTICES = {
    "aws": "terminate at 2026-01-01T08:22:00Z",
    "gcp": "preempted",
    "azure": "Preempt not before Thu, 01 Jan 2026 08:22:00 GMT",
}


@pytest.mark.parametrize("cloud", sorted(CLOUDS))
def test_notice(cloud: str) -> None:
    with metadata_server() as server:
        watch = SpotWatch(cloud, server.url + "/")
        assert [watch._service.notice(watch._get) for _ in range(2)] == [None, None]
        server.notice = True
        assert watch._service.notice(watch._get) == NOTICES[cloud]


def test_token_of_aws_is_kept_and_renewed() -> None:
    with metadata_server() as server:
        watch = SpotWatch("aws", server.url)
        for _ in range(3):
            assert watch._service.notice(watch._get) is None
        assert server.asked == [("PUT", TOKEN_PATH), *3 * [("GET", ACTION_PATH)]]
        server.revoke()
        with pytest.raises(urllib.error.HTTPError):
            watch._service.notice(watch._get)
        server.notice = True
        assert watch._service.notice(watch._get) == NOTICES["aws"]


def test_trouble_is_told_once_and_survived(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    received = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: received.set())
    monkeypatch.setattr(spot, "POLL_S", 0.01)
    # A proxy would be asked about its own host.
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    try:
        with metadata_server() as server:
            server.broken = True
            watch = SpotWatch("gcp", server.url)
            watch.start()
            while len(server.asked) < 5:
                assert not received.wait(0.01)
            server.notice, server.broken = True, False
            assert received.wait(20)
            watch.join(20)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert [record.levelname for record in caplog.records] == 3 * ["WARNING"]
    first, second, third = (record.getMessage() for record in caplog.records)
    assert "503" in first
    assert "in order again" in second
    assert "preempted; this node drains" in third


def test_no_metadata_server_is_no_failure(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spot, "POLL_S", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    watch = SpotWatch("azure", url)
    watch.start()
    while not caplog.records:
        assert watch.is_alive()
        watch.join(0.01)
    watch.stop()
    watch.join(20)
    assert not watch.is_alive()
    assert os.strerror(111) in caplog.records[0].getMessage()
