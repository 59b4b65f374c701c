"""Whole jobs of real processes on this machine, and what happens to them.

Every job is checked in the end: it ends by itself, with the state that an undisturbed one would have, on every rank
(loop.py), and leaves no process behind (harness.py).
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatron_lazarus.elastic.messages import BlockingChannel, ProtocolError
from megatron_lazarus.elastic.settings import EXIT_LEASE
from tests.distributed.launch import REPOSITORY
from tests.elastic.harness import START_LIMIT_S, TOKEN, LocalJob, local_job

# Recovery on a quiet machine takes a tenth of it; a test machine shares its cores.
RECOVERY_LIMIT_S = 10.0


def working(job: LocalJob, generation: int = 1) -> None:
    job.wait_for("working", generation=generation)
    time.sleep(0.2)


def completed(job: LocalJob, *, generation: int, world_size: int) -> dict[str, Any]:
    job.stop()
    result = job.finish()
    assert result["status"] == "completed", job.logs()
    assert (result["generation"], result["value"]["world_size"]) == (generation, world_size), job.logs()
    assert result["step"] == result["value"]["steps"]
    return result


def failures(job: LocalJob) -> list[tuple[str, str]]:
    """(node, cause) of everything that was declared dead."""
    return [(event["node"], event["cause"]) for event in job.events() if event["kind"] == "failure"]


def report(record: Any, job: LocalJob, seconds: float) -> None:
    record("seconds", round(seconds, 3))
    print(f"seconds until working again: {seconds:.3f}")
    assert seconds < RECOVERY_LIMIT_S, job.logs()


@pytest.mark.extensive
def test_a_killed_worker_takes_its_node_along(tmp_path: Path, record_property: Any) -> None:
    with local_job(tmp_path, "a", "b", "c", nproc=2) as job:
        working(job)
        survivors = [job.worker(node, local).pid for node in "ac" for local in (0, 1)]
        report(record_property, job, job.seconds_until_working(job.kill_worker("b", 1), 2))
        assert [job.worker(node, local).pid for node in "ac" for local in (0, 1)] == survivors
        completed(job, generation=2, world_size=4)
        assert failures(job) == [("b", "died")]
        assert job.agents["b"].returncode == 1
        assert job.wait_for("exit", node="b", local_rank=1)["status"] == "killed by SIGKILL"


def test_a_killed_node(tmp_path: Path, record_property: Any) -> None:
    with local_job(tmp_path, "a", "b", "c") as job:
        working(job)
        report(record_property, job, job.seconds_until_working(job.kill_node("a"), 2))
        completed(job, generation=2, world_size=2)
        assert failures(job) == [("a", "died")]


def test_a_killed_agent_takes_its_workers_along(tmp_path: Path) -> None:
    with local_job(tmp_path, "a", "b") as job:
        working(job)
        worker = job.worker("b")
        job.agents["b"].kill()
        job.seconds_until_working(time.time(), 2)
        psutil.wait_procs([worker], timeout=5)
        assert not worker.is_running()
        completed(job, generation=2, world_size=1)


@pytest.mark.extensive
def test_a_stopped_worker_is_found_by_its_silence(tmp_path: Path, record_property: Any) -> None:
    limit = 2.0
    with local_job(tmp_path, "a", "b", "c", heartbeat_timeout_s=limit) as job:
        working(job)
        job.worker("b").suspend()
        seconds = job.seconds_until_working(time.time(), 2)
        report(record_property, job, seconds - limit)
        assert seconds > limit / 2
        completed(job, generation=2, world_size=2)
        assert failures(job) == [("b", "silent")]
        for node in "ac":
            assert "stacks of all threads" in (tmp_path / f"{node}.0.log").read_text()


@pytest.mark.extensive
def test_a_hanging_main_thread_is_found_by_its_place(tmp_path: Path) -> None:
    environment = {"LOOP_FAULT": "hang:c:20"}
    with local_job(tmp_path, "a", "b", "c", environment=environment, collective_timeout_s=2) as job:
        working(job, generation=2)
        completed(job, generation=2, world_size=2)
        assert failures(job) == [("c", "stuck")]
        # The stack of the one that hangs names the place.
        assert "in generation" in (tmp_path / "c.0.log").read_text()


@pytest.mark.extensive
def test_two_of_five_at_once(tmp_path: Path, record_property: Any) -> None:
    with local_job(tmp_path, "a", "b", "c", "d", "e") as job:
        working(job)
        killed = job.kill_node("b", "d")
        # Both are missing from one generation, or, if their ends are heard of apart, from two in a row.
        last = job.wait_until(lambda: job.newest_working(after=1), START_LIMIT_S, "no recovery")
        report(record_property, job, job.seconds_until_working(killed, last))
        completed(job, generation=last, world_size=3)


@pytest.mark.extensive
def test_a_second_failure_during_the_rebuild(tmp_path: Path) -> None:
    environment = {"LOOP_FAULT": "die in build:c:2"}
    with local_job(tmp_path, "a", "b", "c", "d", environment=environment) as job:
        working(job)
        job.kill_worker("b")
        working(job, generation=3)
        completed(job, generation=3, world_size=2)
        assert failures(job) == [("b", "died"), ("c", "died")]


@pytest.mark.extensive
def test_a_newcomer_and_a_returning_node(tmp_path: Path) -> None:
    with local_job(tmp_path, "a", "b") as job:
        working(job)
        job.add("c")
        working(job, generation=2)
        job.kill_node("a")
        working(job, generation=3)
        job.agents["a"].wait()
        job.add("a")
        working(job, generation=4)
        completed(job, generation=4, world_size=3)
        reasons = [event["reason"] for event in job.events() if event["kind"] == "generation"]
        assert reasons == ["start", "change", "failure", "change"]


@pytest.mark.extensive
@pytest.mark.parametrize("told", ["agent", "worker"])
def test_a_drained_node_leaves_at_a_step_boundary(told: str, tmp_path: Path) -> None:
    with local_job(tmp_path, "a", "b", "c") as job:
        working(job)
        if told == "agent":
            job.agents["b"].send_signal(signal.SIGTERM)
        else:
            job.worker("b").send_signal(signal.SIGUSR1)
        working(job, generation=2)
        assert job.agents["b"].wait(10) == 0
        completed(job, generation=2, world_size=2)
        assert failures(job) == []


@pytest.mark.extensive
def test_a_worker_that_raises(tmp_path: Path) -> None:
    with local_job(tmp_path, "a", "b", "c", environment={"LOOP_FAULT": "raise:b:10"}) as job:
        working(job, generation=2)
        completed(job, generation=2, world_size=2)
        assert failures(job) == [("b", "raised")]
        assert 'raise RuntimeError("a bad batch")' in (tmp_path / "b.0.log").read_text()


@pytest.mark.extensive
def test_what_fails_everywhere_ends_the_job(tmp_path: Path) -> None:
    faults = ",".join(f"raise:{node}:{10 if node == 'd' else 12}" for node in "abcd")
    environment = {"LOOP_FAULT": faults}
    with local_job(tmp_path, "a", "b", "c", "d", environment=environment, max_recoveries_without_progress=2) as job:
        result = job.finish(60)
        assert result["status"] == "failed"
        assert "a bad batch" in result["reason"] or any("a bad batch" in text for text in result["failures"])
        assert job.coordinator.returncode == 1


def test_strangers_disturb_nothing(tmp_path: Path) -> None:
    with local_job(tmp_path, "a", "b") as job:
        working(job)
        with socket.create_connection(("127.0.0.1", job.port)) as garbage:
            garbage.sendall(os.urandom(4096))
        with socket.create_connection(("127.0.0.1", job.port)) as silent:
            silent.sendall(b"GET / HTTP/1.0\r\n\r\n" + b" " * 64)
        stale = {"role": "worker", "node": "a", "incarnation": "old", "local_rank": 0, "local_size": 1, "check": {}}
        for token in ("wrong", TOKEN):
            channel = BlockingChannel.connect("127.0.0.1", job.port, token, 5)
            channel.send(stale)
            if token == TOKEN:
                answer = channel.receive(5)
                assert answer is not None
                assert "another node" in answer["refused"]
            else:
                with pytest.raises((ConnectionResetError, ProtocolError)):
                    channel.receive(5)
            channel.close()
        time.sleep(0.3)
        completed(job, generation=1, world_size=2)
        refused = [event["why"] for event in job.events() if event["kind"] == "refused"]
        assert len(refused) == 4, refused
        assert failures(job) == []


def test_a_stale_worker_is_refused(tmp_path: Path) -> None:
    with local_job(tmp_path, "a", "b") as job:
        working(job)
        environment = job.worker("b").environ()
        job.kill_node("b")
        working(job, generation=2)
        command = [sys.executable, "-m", "tests.elastic.loop", str(tmp_path)]
        stale = subprocess.run(
            command, env=environment, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False
        )
        assert stale.returncode != 0
        assert "was declared dead" in stale.stderr
        completed(job, generation=2, world_size=1)


def test_a_node_with_other_code_is_refused(tmp_path: Path) -> None:
    with local_job(tmp_path, "a") as job:
        working(job)
        job.add("b", LOOP_CHECK="2")
        job.wait_for("failure", node="b", cause="check")
        assert job.agents["b"].wait(20) == 1
        completed(job, generation=1, world_size=1)
        assert "code: '2' here, '1' there" in (tmp_path / "b.0.log").read_text()


def test_without_any_coordinator_workers_stop_within_their_lease(tmp_path: Path) -> None:
    with local_job(tmp_path, "a", "b", heartbeat_timeout_s=1, lease_s=2) as job:
        working(job)
        workers = [job.worker(node) for node in "ab"]
        # Stopped, not killed: connections stay open, and nothing tells the workers but their own clock.
        for process in (job.coordinator, job.agents["a"]):
            os.kill(process.pid, signal.SIGSTOP)
        started = time.monotonic()
        while any(worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE for worker in workers):
            # The stopped agent does not reap its worker.
            assert time.monotonic() < started + 15
            time.sleep(0.05)
        seconds = time.monotonic() - started
        os.kill(job.agents["a"].pid, signal.SIGCONT)
        for node in "ab":
            assert job.agents[node].wait(10) == 1
            assert "no contact with the coordinator for 2 s" in (tmp_path / f"{node}.0.log").read_text() or (
                f"status {EXIT_LEASE}" in (tmp_path / f"agent-{node}.log").read_text()
                or "lease_s" in (tmp_path / f"agent-{node}.log").read_text()
            )
        assert 1 < seconds < 10
        job.coordinator.kill()


@pytest.mark.extensive
def test_kills_and_joins_leave_nothing_behind_in_survivors(tmp_path: Path) -> None:
    cycles = int(os.environ.get("LAZARUS_TEST_CYCLES", "4"))
    with local_job(tmp_path, "a", "b", "c", max_nodes=3, max_recoveries_without_progress=99) as job:
        working(job)
        survivor, generation = job.worker("a"), 1
        seconds, usage = [], []
        for cycle in range(cycles):
            # The replacement waits in the lobby, since the job is full.
            victim, spare = ("c" if cycle == 0 else f"s{cycle - 1}"), f"s{cycle}"
            job.add(spare)
            job.wait_for("waiting", node=spare)
            killed = job.kill_node(victim)
            seconds.append(job.seconds_until_working(killed, generation + 1))
            generation += 2
            working(job, generation=generation)
            usage.append((survivor.num_threads(), survivor.num_fds(), survivor.memory_info().rss >> 20))
        print(f"seconds until working again: {sorted(round(one, 3) for one in seconds)}")
        print(f"threads, descriptors, MiB after every cycle: {usage}")
        completed(job, generation=generation, world_size=3)
        assert max(usage[1:])[:2] == min(usage[1:])[:2]
        assert usage[-1][2] <= 1.05 * usage[1][2]
