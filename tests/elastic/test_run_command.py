"""``lazarus run`` and the commands that talk to its job."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from megatron_lazarus.cli import main
from tests.distributed.launch import REPOSITORY, TAG, kill_tagged, tagged
from tests.elastic.harness import START_LIMIT_S

pytestmark = pytest.mark.distributed


@contextlib.contextmanager
def lazarus(*arguments: str | Path) -> Iterator[subprocess.Popen[bytes]]:
    """A ``lazarus`` command of which nothing survives."""
    tag = uuid.uuid4().hex
    command = [sys.executable, "-m", "megatron_lazarus.cli", *map(str, arguments)]
    process = subprocess.Popen(
        command,
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONFAULTHANDLER": "1", TAG: tag},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield process
        assert process.poll() is not None
        assert [one.cmdline() for one in tagged(tag)] == []
    finally:
        kill_tagged(tag)
        process.wait()


def wait_for_event(log_dir: Path, kind: str, generation: int, term: int = 1) -> None:
    """Of a coordinator of that term, or a later one."""
    deadline = time.monotonic() + START_LIMIT_S
    path = log_dir / "events.jsonl"
    while time.monotonic() < deadline:
        ruled = 0
        for line in path.read_text().split("\n")[:-1] if path.exists() else []:
            event = json.loads(line)
            ruled = event.get("term", ruled)
            if (event["kind"], event["generation"]) == (kind, generation) and ruled >= term:
                return
        time.sleep(0.05)
    raise AssertionError(f"no {kind} in generation {generation}: {[p.read_text() for p in log_dir.glob('*.log')]}")


def test_run_status_add_node_drain(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logs = ("--log-dir", str(tmp_path))
    options = ["--nnodes", "1:3", "--local-nodes", "2", *logs, "--module", "tests.elastic.loop", str(tmp_path)]
    config = tmp_path / "ds.json"
    config.write_text(json.dumps({"lazarus": {"elastic": {"start_nodes": 2}}}))
    with lazarus("run", "--config", config, *options) as run:
        wait_for_event(tmp_path, "working", 1)
        assert (tmp_path / "job.json").stat().st_mode & 0o077 == 0
        assert main(["status", *logs]) == 0
        shown = capsys.readouterr().out
        assert "generation 1, live" in shown
        assert "node1" in shown
        with lazarus("add-node", *logs) as added:
            wait_for_event(tmp_path, "working", 2)
            assert main(["drain", "node2", *logs]) == 0
            wait_for_event(tmp_path, "working", 3)
            assert added.wait(20) == 0
        assert main(["drain", "nowhere", *logs]) == 1
        assert "not in the job" in capsys.readouterr().err
        (tmp_path / "stop").touch()
        assert run.wait(30) == 0
    assert main(["status", *logs]) == 0
    assert "the job has completed in generation 3" in capsys.readouterr().out
    assert not (tmp_path / "job.json").exists()


def test_run_ends_with_the_jobs_result_though_its_coordinator_was_killed(tmp_path: Path) -> None:
    config = tmp_path / "ds.json"
    config.write_text(json.dumps({"lazarus": {"elastic": {"start_nodes": 3}}}))
    options = ["--nnodes", "1:3", "--local-nodes", "3", "--log-dir", tmp_path, "--config", config]
    with lazarus("run", *options, "--module", "tests.elastic.loop", str(tmp_path)) as run:
        wait_for_event(tmp_path, "working", 1)
        first = json.loads((tmp_path / "job.json").read_text())
        (process,) = [one for one in psutil.Process(run.pid).children() if "elastic.coordinator" in str(one.cmdline())]
        process.kill()
        wait_for_event(tmp_path, "live", 1, term=2)
        assert main(["drain", "node2", "--log-dir", str(tmp_path)]) == 0
        wait_for_event(tmp_path, "working", 2)
        assert json.loads((tmp_path / "job.json").read_text())["token"] == first["token"]
        (tmp_path / "stop").touch()
        assert run.wait(30) == 0
    assert json.loads((tmp_path / "result.json").read_text())["status"] == "completed"


def test_a_script_that_fails_fails_the_command(tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text("raise SystemExit(3)\n")
    with lazarus("run", "--nnodes", "1", "--log-dir", tmp_path, script) as run:
        assert run.wait(60) == 1
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["status"] == "failed"
    assert "exit status 3" in result["failures"][0]


@pytest.mark.parametrize("nnodes", ["0", "3:2", "x"])
def test_impossible_numbers_of_nodes(nnodes: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--nnodes", nnodes, "--log-dir", str(tmp_path), "script.py"]) == 1
    assert "nodes" in capsys.readouterr().err
