"""A metadata server as the three clouds have one, whose notices the test gives."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOKEN_PATH = "/latest/api/token"
ACTION_PATH = "/latest/meta-data/spot/instance-action"
PREEMPTED_PATH = "/computeMetadata/v1/instance/preempted"
NAME_PATH = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
EVENTS_PATH = "/metadata/scheduledevents?api-version=2020-07-01"


class MetadataServer(ThreadingHTTPServer):
    """``notice``: whether the host is to be taken back. ``broken``: every request fails. ``asked``: what was asked."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.notice = self.broken = False
        self.tokens: list[str] = []
        self.asked: list[tuple[str, str]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def revoke(self) -> None:
        """Tokens given so far open nothing any more."""
        self.tokens.append("revoked")


class _Handler(BaseHTTPRequestHandler):
    server: MetadataServer

    def log_message(self, format: str, *arguments: object) -> None:
        pass

    def _give(self, code: int, text: str = "") -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def do_PUT(self) -> None:
        self.server.asked.append(("PUT", self.path))
        if self.path != TOKEN_PATH or not self.headers.get("X-aws-ec2-metadata-token-ttl-seconds"):
            return self._give(400)
        self.server.tokens.append(f"token{len(self.server.tokens)}")
        return self._give(200, self.server.tokens[-1])

    def do_GET(self) -> None:
        server = self.server
        server.asked.append(("GET", self.path))
        if server.broken:
            return self._give(503)
        if self.path == ACTION_PATH:
            if self.headers.get("X-aws-ec2-metadata-token") not in server.tokens[-1:]:
                return self._give(401)
            action = {"action": "terminate", "time": "2026-01-01T08:22:00Z"}
            return self._give(200, json.dumps(action)) if server.notice else self._give(404)
        if self.path == PREEMPTED_PATH:
            if self.headers.get("Metadata-Flavor") != "Google":
                return self._give(403)
            return self._give(200, "TRUE" if server.notice else "FALSE")
        if self.headers.get("Metadata") != "true":
            return self._give(400)
        if self.path == NAME_PATH:
            return self._give(200, "this-host")
        if self.path == EVENTS_PATH:
            # Another host of the scale set goes all the time, and this one is only frozen for a moment.
            events = [_event("Preempt", "another-host"), _event("Freeze", "this-host")]
            events += [_event("Preempt", "this-host")] if server.notice else []
            return self._give(200, json.dumps({"DocumentIncarnation": 1, "Events": events}))
        return self._give(404)


def _event(kind: str, host: str) -> dict[str, object]:
    return {
        "EventId": f"{kind}-{host}",
        "EventType": kind,
        "ResourceType": "VirtualMachine",
        "Resources": [host],
        "EventStatus": "Scheduled",
        "NotBefore": "Thu, 01 Jan 2026 08:22:00 GMT",
        "EventSource": "Platform",
    }


@contextlib.contextmanager
def metadata_server() -> Iterator[MetadataServer]:
    server = MetadataServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
