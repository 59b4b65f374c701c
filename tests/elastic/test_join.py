"""``lazarus join``: nodes that meet through the log folder, with real processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatron_lazarus.elastic.settings import EXIT_LEFT
from tests.elastic.harness import START_LIMIT_S
from tests.elastic.test_run_command import lazarus, wait_for_event

pytestmark = pytest.mark.distributed


def join(tmp_path: Path, node: str) -> Any:
    config = tmp_path / "ds.json"
    if not config.exists():
        config.write_text(json.dumps({"lazarus": {"elastic": {"heartbeat_timeout_s": 2, "lease_s": 6}}}))
    counts = ("--min-nodes", "1", "--start-nodes", "3", "--config", config)
    where = ("--address", "127.0.0.1", "--node", node, "--log-dir", tmp_path)
    return lazarus("join", *counts, *where, "--module", "tests.elastic.loop", tmp_path)


@contextlib.contextmanager
def three(tmp_path: Path) -> Iterator[dict[str, Any]]:
    with join(tmp_path, "a") as a, join(tmp_path, "b") as b, join(tmp_path, "c") as c:
        yield {"a": a, "b": b, "c": c}


def coordinators_node(processes: dict[str, Any]) -> str:
    for node, process in processes.items():
        for child in psutil.Process(process.pid).children():
            if "megatron_lazarus.elastic.coordinator" in child.cmdline():
                return node
    raise AssertionError("no coordinator")


def signal_all(process: Any, number: int) -> None:
    """As a batch system does: every process that it can find."""
    head = psutil.Process(process.pid)
    for one in [*head.children(recursive=True), head]:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.send_signal(number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_node_with_the_coordinator_is_told_to_leave(tmp_path: Path, number: int) -> None:
    with three(tmp_path) as processes:
        wait_for_event(tmp_path, "working", 1)
        first = coordinators_node(processes)
        signal_all(processes[first], number)
        assert processes[first].wait(30) == EXIT_LEFT
        wait_for_event(tmp_path, "working", 2)
        others = {node: process for node, process in processes.items() if node != first}
        with join(tmp_path, first) as returned:
            wait_for_event(tmp_path, "working", 3)
            (tmp_path / "stop").touch()
            assert [process.wait(30) for process in (*others.values(), returned)] == [0, 0, 0]
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [event for event in events if event["kind"] == "failure"] == []
    assert sum(event["kind"] == "listening" for event in events) == 2
    # Whoever is started again has nothing to do.
    with join(tmp_path, "a") as again:
        assert again.wait(30) == 0


def test_node_that_fails_joins_again(tmp_path: Path) -> None:
    with three(tmp_path) as processes:
        wait_for_event(tmp_path, "working", 1)
        first = coordinators_node(processes)
        worker = next(
            child
            for child in psutil.Process(processes[first].pid).children()
            if "tests.elastic.loop" in child.cmdline()
        )
        worker.kill()
        wait_for_event(tmp_path, "working", 3)
        (tmp_path / "stop").touch()
        assert [process.wait(30) for process in processes.values()] == [0, 0, 0]


def test_node_that_still_looks_for_its_job_leaves(tmp_path: Path) -> None:
    (tmp_path / "attempts").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    (tmp_path / "attempts" / "attempt-000001").write_text(json.dumps({"coordinator": address, "token": "x"}))
    with join(tmp_path, "a") as alone:
        deadline = time.monotonic() + START_LIMIT_S
        while not (tmp_path / "run.json").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        alone.send_signal(signal.SIGTERM)
        assert alone.wait(30) == EXIT_LEFT


def test_run_that_has_lost_all_nodes_begins_a_new_attempt(tmp_path: Path) -> None:
    with three(tmp_path) as processes:
        wait_for_event(tmp_path, "working", 1)
        for process in processes.values():
            process.kill()
        for process in processes.values():
            process.wait(20)
    (tmp_path / "events.jsonl").rename(tmp_path / "events-of-the-first.jsonl")
    with three(tmp_path) as processes:
        wait_for_event(tmp_path, "working", 1)
        (tmp_path / "stop").touch()
        assert [process.wait(30) for process in processes.values()] == [0, 0, 0]
    assert len(os.listdir(tmp_path / "attempts")) == 2
