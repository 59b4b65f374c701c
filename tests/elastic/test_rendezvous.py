"""Nodes that meet through a folder: one founds, all others join it, and only a dead attempt is followed by another."""

from __future__ import annotations

import json
import os
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_lazarus.elastic import rendezvous
from megatron_lazarus.elastic.journal import JOB_FILE, write_json
from megatron_lazarus.elastic.rendezvous import FOLDER, Meeting, Rendezvous
from megatron_lazarus.elastic.settings import BEAT_S

LEASE_S = 15.0
OVER_S = LEASE_S + 3 * BEAT_S


class World:
    """A clock, and the coordinators that answer."""

    def __init__(self) -> None:
        self.now = 0.0
        self.alive: set[tuple[str, str]] = set()
        self._lock = threading.Lock()
        self.met: list[Meeting] = []

    def answers(self, job: dict[str, str]) -> bool:
        return (job["coordinator"], job["token"]) in self.alive

    def node(self, folder: Path) -> Rendezvous:
        return Rendezvous(folder, "127.0.0.1", LEASE_S, clock=lambda: self.now)

    def serve(self, meeting: Meeting) -> Meeting:
        """What a founder does."""
        with self._lock:
            self.alive.add((meeting.address, meeting.token))
            self.met.append(meeting)
        return meeting

    def look(self, node: Rendezvous, seconds: float) -> Meeting | None:
        """What a node finds that looks again and again for so long."""
        end = self.now + seconds
        while self.now < end:
            if (meeting := node.look()) is not None:
                return meeting
            self.now += 0.5
        return None


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    made = World()
    monkeypatch.setattr(rendezvous, "_answers", made.answers)
    monkeypatch.delenv("LAZARUS_TOKEN", raising=False)
    yield made
    for meeting in made.met:
        if meeting.listener is not None:
            meeting.listener.close()


def test_first_one_founds_and_others_join(world: World, tmp_path: Path) -> None:
    founded = world.node(tmp_path).look()
    assert founded is not None
    assert founded.listener is not None
    assert founded.address == f"127.0.0.1:{founded.listener.getsockname()[1]}"
    (file,) = (tmp_path / FOLDER).iterdir()
    assert file.stat().st_mode & 0o077 == 0
    # It has not begun to serve.
    late = world.node(tmp_path)
    assert world.look(late, 5.0) is None
    world.serve(founded)
    assert late.look() == Meeting(founded.address, founded.token)


@pytest.mark.parametrize("round_", range(5))
def test_of_many_at_once_one_founds(world: World, tmp_path: Path, round_: int) -> None:
    barrier = threading.Barrier(12)
    found: Counter[str] = Counter()

    def join() -> None:
        node = world.node(tmp_path)
        barrier.wait(20)
        meeting = node.look()
        if meeting is not None:
            world.serve(meeting)
            found[meeting.token] += meeting.listener is not None

    threads = [threading.Thread(target=join) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert list(found.values()) == [1]
    assert len(list((tmp_path / FOLDER).iterdir())) == 1


def test_successor_is_found_by_the_job_file(world: World, tmp_path: Path) -> None:
    founded = world.node(tmp_path).look()
    assert founded is not None
    world.met.append(founded)
    successor = {"coordinator": "10.0.0.7:29500", "token": founded.token}
    write_json(tmp_path / JOB_FILE, successor)
    world.alive.add((successor["coordinator"], successor["token"]))
    assert world.node(tmp_path).look() == Meeting("10.0.0.7:29500", founded.token)


def test_job_file_of_an_earlier_attempt_leads_nowhere(world: World, tmp_path: Path) -> None:
    write_json(tmp_path / JOB_FILE, {"coordinator": "10.0.0.7:29500", "token": "of before"})
    world.alive.add(("10.0.0.7:29500", "of before"))
    founded = world.node(tmp_path).look()
    assert founded is not None
    world.serve(founded)
    assert world.node(tmp_path).look() == Meeting(founded.address, founded.token)


def test_next_attempt_only_when_the_last_is_surely_over(world: World, tmp_path: Path) -> None:
    first = world.node(tmp_path).look()
    assert first is not None
    world.met.append(first)
    job = tmp_path / JOB_FILE
    job.write_text(json.dumps({"coordinator": first.address, "token": first.token}))
    waiting = world.node(tmp_path)
    # Out of reach of this node, but it shows that it is there.
    for beat in range(20):
        os.utime(job, (beat, beat))
        assert world.look(waiting, OVER_S - 1.0) is None
    os.utime(job, (99, 99))
    since = world.now
    second = world.look(waiting, 2 * OVER_S)
    assert second is not None
    world.serve(second)
    assert OVER_S - 2.0 < world.now - since < OVER_S + 2.0
    assert second.token != first.token
    assert waiting.newest() == 2


def test_time_in_which_the_storage_hung_does_not_count(world: World, tmp_path: Path) -> None:
    first = world.node(tmp_path).look()
    assert first is not None
    world.met.append(first)
    waiting = world.node(tmp_path)
    assert waiting.look() is None
    world.now += 10 * OVER_S
    assert waiting.look() is None
    assert waiting.look() is None


def test_limit(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = world.node(tmp_path).look()
    assert first is not None
    world.met.append(first)

    def sleep(seconds: float) -> None:
        world.now += seconds

    monkeypatch.setattr(rendezvous.time, "sleep", sleep)
    with pytest.raises(TimeoutError, match="no coordinator answers"):
        world.node(tmp_path).meet(10.0)
