"""Notices by which a cloud announces that it takes a host back: asked for again and again, they drain the node.

Formats: AWS EC2 "Spot Instance interruption notices" (``instance-action``, 120 s before) with an IMDSv2 token, Google
Compute Engine "Spot VMs: detect preemption" (``instance/preempted``, 30 s before), Azure "Scheduled Events"
(``Preempt`` and ``Terminate``, 30 s and more before).
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping

logger = logging.getLogger(__name__)

POLL_S = 1.0
REQUEST_LIMIT_S = 2.0
_TOKEN_LIFE_S = 21600

Get = Callable[[str, Mapping[str, str], str], bytes | None]
"""Path, headers and method of a request to its answer; None: 404, there is no such thing."""


class Aws:
    url = "http://169.254.169.254"

    def __init__(self) -> None:
        self._token: str | None = None

    def notice(self, get: Get) -> str | None:
        if self._token is None:
            wanted = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_LIFE_S)}
            self._token = (get("/latest/api/token", wanted, "PUT") or b"").decode()
        # A host that offers no IMDSv2 is asked without a token.
        headers = {"X-aws-ec2-metadata-token": self._token} if self._token else {}
        try:
            answer = get("/latest/meta-data/spot/instance-action", headers, "GET")
        except urllib.error.HTTPError as error:
            if error.code == 401:
                # It has run out.
                self._token = None
            raise
        if answer is None:
            return None
        action = json.loads(answer)
        return f"{action['action']} at {action['time']}"


class Gcp:
    url = "http://metadata.google.internal"

    def notice(self, get: Get) -> str | None:
        answer = get("/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"}, "GET")
        return "preempted" if answer is not None and answer.strip().upper() == b"TRUE" else None


class Azure:
    url = "http://169.254.169.254"

    def __init__(self) -> None:
        self._name: str | None = None

    def notice(self, get: Get) -> str | None:
        headers = {"Metadata": "true"}
        if self._name is None:
            path = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
            self._name = (get(path, headers, "GET") or b"").decode().strip()
        answer = get("/metadata/scheduledevents?api-version=2020-07-01", headers, "GET")
        for event in json.loads(answer)["Events"] if answer else ():
            # The list is that of the whole scale set.
            if event["EventType"] in ("Preempt", "Terminate") and self._name in event["Resources"]:
                return f"{event['EventType']} not before {event.get('NotBefore') or 'now'}"
        return None


CLOUDS: Mapping[str, type[Aws] | type[Gcp] | type[Azure]] = {"aws": Aws, "gcp": Gcp, "azure": Azure}


class SpotWatch(threading.Thread):
    """Sends this process SIGTERM, which an agent takes as its node's drain, once the cloud gives notice.

    ``url``: of the metadata server, if not the cloud's own.
    """

    def __init__(self, cloud: str, url: str | None = None) -> None:
        super().__init__(name="lazarus-spot", daemon=True)
        self._cloud, self._service = cloud, CLOUDS[cloud]()
        self._url = (url or self._service.url).rstrip("/")
        # Never by way of a proxy: the answers are about this host.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self._ended = threading.Event()

    def run(self) -> None:
        trouble = ""
        while not self._ended.wait(POLL_S):
            try:
                notice, now = self._service.notice(self._get), ""
            except (OSError, ValueError, KeyError, TypeError) as error:
                # A metadata server that is out of order is no reason to stop training; each new trouble is told once.
                notice, now = None, f"{type(error).__name__}: {error}"
            if now != trouble:
                logger.warning("spot notices of %s at %s: %s", self._cloud, self._url, now or "in order again")
                trouble = now
            if notice is not None:
                logger.warning("spot notice of %s: %s; this node drains", self._cloud, notice)
                os.kill(os.getpid(), signal.SIGTERM)
                return

    def stop(self) -> None:
        self._ended.set()

    def _get(self, path: str, headers: Mapping[str, str], method: str) -> bytes | None:
        request = urllib.request.Request(self._url + path, headers=dict(headers), method=method)
        try:
            with self._opener.open(request, timeout=REQUEST_LIMIT_S) as answer:
                return bytes(answer.read(1 << 20))
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            raise


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--spot", choices=sorted(CLOUDS), help="drain the node when this cloud takes the host back")
    parser.add_argument("--spot-url", metavar="URL", help="of its metadata server, if not the usual one")


def options(arguments: argparse.Namespace) -> list[str]:
    """The same options for another command."""
    given = [] if arguments.spot is None else ["--spot", arguments.spot]
    return given + ([] if arguments.spot_url is None else ["--spot-url", arguments.spot_url])


def watch(arguments: argparse.Namespace) -> None:
    """Begin to ask, if the user wants that."""
    if arguments.spot is not None:
        SpotWatch(arguments.spot, arguments.spot_url).start()
