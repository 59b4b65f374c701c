"""The coordinator's rules, without processes: every message is handed over by the test, and so is the time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_lazarus.elastic.job import Job
from megatron_lazarus.elastic.journal import Journal
from megatron_lazarus.elastic.roster import Failure, Worker, natural
from megatron_lazarus.elastic.settings import BUILD_TIMEOUT_S, QUARANTINE_WINDOW_S, ElasticConfig


class Recorder:
    """Takes the place of a connection."""

    address = "127.0.0.1"

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []

    def send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)

    def pushed(self, kind: str) -> list[dict[str, Any]]:
        return [message for message in self.sent if message.get("push") == kind]


class World:
    """A job with one worker per node, and its clock."""

    def __init__(self, **settings: Any) -> None:
        self.now = 100.0
        self.stores = 0
        self.job = Job(ElasticConfig(**settings), Journal(None), self.open_store, lambda: self.now)
        self.workers: dict[str, Worker] = {}

    def open_store(self) -> tuple[int, object]:
        self.stores += 1
        return self.stores, object()

    def arrive(self, *names: str) -> None:
        for name in names:
            node = self.job.add_node(name, f"{name}@{self.now}", 1)
            node.agent, node.agent_heard = Recorder(), self.now  # type: ignore[assignment]
            worker = Worker(node, 0, Recorder(), self.now, since=self.now)  # type: ignore[arg-type]
            node.workers[0] = worker
            self.workers[name] = worker
            self.job.ask_join(worker, {"do": "join", "id": 1})

    def build(self, *names: str) -> None:
        for name in names:
            self.job.built(self.workers[name], self.job.generation)

    def ask_next(self, *names: str, step: int = 0, admit: tuple[str, ...] = (), begins: int | None = None) -> None:
        for name in names:
            request = {"do": "next", "id": 2, "step": step, "admit": list(admit), "begins": begins}
            self.job.ask_next(self.workers[name], request)

    def fail(self, name: str) -> None:
        self.job.fail_node(self.job.nodes[name], "died", "killed")

    def pass_time(self, seconds: float, *silent: str) -> None:
        """Let time pass, of which all but the silent are heard."""
        self.now += seconds
        for name, worker in self.workers.items():
            if name not in silent:
                worker.heard = worker.node.agent_heard = self.now
        self.job.tick()

    @property
    def members(self) -> str:
        return "".join(node.name for node in self.job.members)

    def sent(self, name: str) -> Recorder:
        return self.workers[name].channel  # type: ignore[return-value]


def started(*names: str, **settings: Any) -> World:
    world = World(**{"start_nodes": len(names), **settings})
    world.arrive(*names)
    world.build(*names)
    assert world.job.phase == "live"
    return world


def test_the_start_waits_for_nodes_within_the_window() -> None:
    world = World(min_nodes=2, start_nodes=3, join_window_s=10)
    world.arrive("b")
    world.pass_time(1000)
    assert world.job.generation == 0
    world.arrive("a")
    world.pass_time(9)
    assert world.job.generation == 0
    world.pass_time(2)
    assert (world.job.generation, world.members) == (1, "ab")
    assert World(start_nodes=1, min_nodes=1).job.generation == 0


def test_nodes_that_fail_before_the_start_are_waited_for() -> None:
    world = World(min_nodes=1, start_nodes=3, join_window_s=10)
    world.arrive("a")
    world.fail("a")
    world.pass_time(9)
    assert world.job.result is None
    world.arrive("b")
    world.fail("b")
    world.pass_time(2)
    assert world.job.result is not None
    assert world.job.result["reason"] == "every node failed before the start"
    # Where none can come any more, nothing is waited for.
    world = World(min_nodes=1, start_nodes=1)
    world.arrive("a")
    world.fail("a")
    assert world.job.result is not None


def test_ranks_are_dealt_in_order_of_members() -> None:
    world = started("n2", "n10", "n1")
    answers = {name: world.sent(name).sent[0] for name in world.workers}
    assert {name: answer["rank"] for name, answer in answers.items()} == {"n1": 0, "n2": 1, "n10": 2}
    assert [member["node"] for member in answers["n1"]["members"]] == ["n1", "n2", "n10"]
    assert sorted(["n10", "n2"], key=natural) == ["n2", "n10"]


def test_the_next_generation_waits_for_every_survivor() -> None:
    world = started("a", "b", "c")
    world.fail("b")
    assert world.job.phase == "broken"
    assert world.sent("a").pushed("broken")
    assert world.sent("b").pushed("evicted")
    world.ask_next("a")
    assert world.job.generation == 1
    world.ask_next("c")
    assert (world.job.generation, world.members, world.stores) == (2, "ac", 2)


def test_who_is_alive_is_known_only_after_its_silence() -> None:
    world = started("a", "b", "c", heartbeat_timeout_s=5)
    world.job.worker_failed(world.workers["a"], {"generation": 1, "step": 3, "error": "peer gone", "own": False})
    world.ask_next("a", "b")
    world.pass_time(4, "c")
    assert world.job.generation == 1
    world.pass_time(2, "c")
    assert (world.job.generation, world.members) == (2, "ab")


def test_members_that_do_not_build_are_left_out() -> None:
    world = started("a", "b", "c")
    world.fail("c")
    world.ask_next("a", "b")
    world.build("a")
    world.pass_time(2 * BUILD_TIMEOUT_S + 1)
    assert world.job.nodes["b"].state == "dead"
    assert world.sent("a").pushed("dump")
    world.ask_next("a")
    assert (world.job.generation, world.members) == (3, "a")


def test_newcomers_are_admitted_when_all_members_ask_for_them() -> None:
    world = started("a", "b")
    world.arrive("c", "d")
    assert world.sent("a").pushed("pending")[-1]["join"] == ["c", "d"]
    world.ask_next("a", admit=("c",))
    world.ask_next("b", admit=("c", "d"))
    assert (world.job.generation, world.members) == (2, "abc")
    # After a failure nobody is admitted: survivors first agree among themselves.
    world.build("a", "b", "c")
    world.fail("a")
    world.ask_next("b", "c", admit=("d",))
    assert world.members == "bc"


def test_a_full_job_keeps_spares_waiting() -> None:
    world = started("a", "b", max_nodes=2)
    world.arrive("c")
    assert world.job.pending()["join"] == []
    world.fail("b")
    world.ask_next("a")
    world.build("a")
    assert world.job.pending()["join"] == ["c"]


def test_too_few_survivors_take_newcomers_or_give_up() -> None:
    world = started("a", "b", min_nodes=2, join_window_s=10)
    world.fail("b")
    world.ask_next("a", begins=7)
    world.pass_time(5)
    world.arrive("c")
    assert (world.job.generation, world.members) == (2, "ac")
    world.build("a", "c")
    world.fail("c")
    world.ask_next("a", begins=7)
    world.pass_time(9)
    assert world.job.result is None
    world.pass_time(2)
    assert world.job.result is not None
    assert world.job.result["status"] == "failed"
    assert "min_nodes is 2" in world.job.result["reason"]


def test_too_few_survivors_complete_what_is_no_step_alone() -> None:
    world = started("a", "b", "c", min_nodes=3, join_window_s=10)
    world.arrive("d")
    world.fail("c")
    world.ask_next("a", begins=7)
    world.ask_next("b", begins=None)
    assert (world.job.generation, world.members) == (2, "ab")
    world.build("a", "b")
    assert world.sent("a").pushed("pending")[-1]["short"]
    world.ask_next("a", "b", begins=8)
    assert (world.job.generation, world.members) == (3, "abd")


def test_step_is_abandoned_at_half_of_the_drain_grace() -> None:
    world = started("a", "b")
    world.job.drain("b", 6)
    world.pass_time(2)
    assert world.job.phase == "live"
    world.pass_time(2)
    assert world.job.phase == "broken"
    world.ask_next("a", "b")
    world.build("a", "b")
    world.pass_time(1)
    assert world.job.phase == "live"


def test_a_drained_node_leaves_without_failure() -> None:
    world = started("a", "b")
    assert world.job.drain("b", 5) is None
    assert world.sent("a").pushed("pending")[-1]["drain"] == {"b": 5}
    world.ask_next("a")
    world.job.leave(world.workers["b"])
    assert (world.job.generation, world.members, world.job.nodes["b"].state) == (2, "a", "left")
    assert "not in the job" in str(world.job.drain("x"))


def test_a_job_that_all_nodes_leave_is_drained() -> None:
    world = started("a", "b")
    for name in "ab":
        world.job.drain(name)
    for name in "ab":
        world.job.leave(world.workers[name])
    assert world.job.result is not None
    assert world.job.result["status"] == "drained"
    world = started("a", "b")
    world.job.drain("b")
    world.fail("a")
    world.job.leave(world.workers["b"])
    assert world.job.result is not None
    assert world.job.result["status"] == "failed"


def test_a_drain_that_takes_too_long_is_a_failure() -> None:
    world = started("a", "b", drain_grace_s=5)
    world.job.drain("b")
    world.pass_time(6)
    assert (world.job.nodes["b"].state, world.job.phase) == ("dead", "broken")


@pytest.mark.parametrize(
    ("places", "evicted"),
    [
        ({"a": (5, 3, "collective"), "b": (5, 2, "forward"), "c": (5, 3, "collective")}, "b"),
        ({"a": (5, 3, "collective"), "b": (5, 3, "forward"), "c": (5, 3, "collective")}, "b"),
        ({"a": (5, 3, "collective"), "b": (4, 9, "collective"), "c": (5, 3, "collective")}, "b"),
        ({"a": (5, 3, "collective"), "b": (5, 3, "collective"), "c": (5, 3, "collective")}, ""),
    ],
)
def test_those_the_others_wait_for_are_evicted(places: dict[str, tuple[int, int, str]], evicted: str) -> None:
    world = started("a", "b", "c", collective_timeout_s=60)
    for name, (step, collective, phase) in places.items():
        worker = world.workers[name]
        worker.step, worker.collective, worker.phase, worker.since = step, collective, phase, world.now
    world.pass_time(59)
    assert "broken" not in [world.job.phase]
    world.pass_time(2)
    assert "broken" in [world.job.phase]
    assert "".join(name for name, node in world.job.nodes.items() if not node.alive) == evicted
    assert world.sent("a").pushed("dump")


def test_long_computation_is_nobodys_fault() -> None:
    world = started("a", "b", collective_timeout_s=60)
    for worker in world.workers.values():
        worker.phase = "forward"
    world.pass_time(1000)
    assert world.job.phase == "live"


def test_the_same_failure_again_and_again_ends_the_job() -> None:
    world = started("a", "b", "c", "d", "e", max_recoveries_without_progress=3)
    for step, victim in [(7, "e"), (7, "d"), (8, "c"), (8, "b")]:
        for name in "abcde":
            if world.job.nodes[name].alive:
                world.workers[name].step = step
        world.fail(victim)
        world.ask_next(*(node.name for node in world.job.living()), step=step)
        assert world.job.result is None
        world.build(*(node.name for node in world.job.living()))
    world.arrive("f")
    world.ask_next("a", step=8, admit=("f",))
    world.fail("f")
    world.ask_next("a", step=8)
    assert world.job.result is not None
    assert "3 recoveries after step 8 without progress (died)" in world.job.result["reason"]


def test_signatures_do_not_depend_on_who_failed() -> None:
    one = Failure("raised", "a", "ValueError: batch 17 on rank 3")
    assert one.signature == Failure("raised", "b", "ValueError: batch 18 on rank 11").signature
    assert one.signature != Failure("raised", "a", "KeyError: 17").signature
    assert Failure("died", "a", "x").signature == Failure("died", "b", "y").signature


def test_the_end_needs_every_member() -> None:
    world = started("a", "b")
    finish = {"do": "finish", "id": 3, "step": 9, "generation": 1, "value": 42}
    world.job.ask_finish(world.workers["a"], finish)
    assert world.job.result is None
    world.job.ask_finish(world.workers["b"], finish)
    assert world.job.result is not None
    assert (world.job.result["status"], world.job.result["value"]) == ("completed", 42)
    # What dies now no longer matters.
    world.fail("a")
    assert world.job.phase == "ended"


def test_a_failure_at_the_end_calls_the_finished_back() -> None:
    world = started("a", "b", "c")
    world.job.ask_finish(world.workers["a"], {"do": "finish", "id": 3, "step": 9, "generation": 1})
    world.fail("b")
    assert world.sent("a").sent[-1] == {"re": 3, "broken": 1}
    world.ask_next("a", "c")
    assert world.members == "ac"


def test_only_the_last_one_missing_fails_at_the_end() -> None:
    world = started("a", "b")
    world.job.ask_finish(world.workers["a"], {"do": "finish", "id": 3, "step": 9, "generation": 1})
    world.fail("b")
    assert world.job.result is not None
    assert world.job.result["status"] == "completed"


def test_publication_is_fenced() -> None:
    world = started("a", "b", "c")
    assert world.job.may_publish(world.workers["c"], 1)
    world.fail("c")
    world.ask_next("a", "b")
    world.build("a", "b")
    # Nothing newer has been published yet, so a checkpoint begun in the generation before may still be.
    assert world.job.may_publish(world.workers["a"], 1)
    assert world.job.may_publish(world.workers["a"], 2)
    assert not world.job.may_publish(world.workers["b"], 1)
    assert not world.job.may_publish(world.workers["a"], 3)
    assert not world.job.may_publish(world.workers["c"], 2)


def test_a_node_that_keeps_failing_is_quarantined() -> None:
    world = started("a", "b", max_recoveries_without_progress=99)
    for _ in range(3):
        assert world.job.quarantine.left_s("b", world.now) == 0
        world.fail("b")
        world.ask_next("a")
        world.build("a")
        world.arrive("b")
        world.ask_next("a", admit=("b",))
        world.build("a", "b")
        world.pass_time(1)
    assert world.job.quarantine.left_s("b", world.now) == pytest.approx(QUARANTINE_WINDOW_S - 3)
    assert world.job.quarantine.left_s("b", world.now + QUARANTINE_WINDOW_S) == 0
    assert world.job.quarantine.left_s("a", world.now) == 0


def test_the_journal_publishes_whole_results(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text("of an earlier job")
    journal = Journal(tmp_path)
    assert not (tmp_path / "result.json").exists()
    journal.event(3, "live", seconds={"build": 0.5})
    journal.result({"status": "completed"})
    journal.close()
    entry = json.loads((tmp_path / "events.jsonl").read_text())
    assert (entry["generation"], entry["kind"], entry["seconds"]) == (3, "live", {"build": 0.5})
    assert json.loads((tmp_path / "result.json").read_text()) == {"status": "completed"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["events.jsonl", "result.json"]
