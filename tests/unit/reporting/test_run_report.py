"""A golden events file: a kill, a join, a hang with a second death during the regroup, a drain, the end."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from megatron_lazarus.cli import main
from megatron_lazarus.reporting.run_report import Recovery, describe, read_events, summarize

DATA = Path(__file__).parent / "data"
EVENTS = read_events(DATA)


def until(kind: str, **fields: Any) -> list[dict[str, Any]]:
    """The events up to the newest one like this."""
    matching = [i for i, e in enumerate(EVENTS) if e["kind"] == kind and fields.items() <= e.items()]
    return EVENTS[: matching[-1] + 1]


def test_result_and_nodes() -> None:
    summary = summarize(EVENTS)
    assert (summary.result, summary.steps) == ("completed", 76)
    assert summary.lost == ("node2", "node1", "node3")
    assert summary.joined == summary.left == ("node2",)
    assert summary.evictions == ("node1 silent: local rank 0 is silent",)
    assert (summary.goodput, summary.wall_s) == (round(43.0 / 47.5, 4), 47.5)


def test_generations_name_their_cause() -> None:
    causes = [generation.cause for generation in summarize(EVENTS).generations]
    assert causes == [
        "start",
        "failure: node2 died: its agent closed its connection",
        "node2 joined",
        "failure: node1 silent: local rank 0 is silent",
        "failure: node3 died: local rank 0 closed its connection",
        "node2 left",
    ]


def test_a_recovery_from_detection_to_the_first_step() -> None:
    first = summarize(EVENTS).recoveries[0]
    phases = {"silent": 0.0, "gather": 0.05, "build": 0.02, "state": 0.01, "plan": 0.015, "migrate": 0.02}
    causes = ("node2 died: its agent closed its connection",)
    assert first == Recovery(2, causes, 20, {**phases, "first step": 0.48}, 0.6)


def test_a_second_failure_belongs_to_the_recovery_it_interrupts() -> None:
    _, second = summarize(EVENTS).recoveries
    assert (second.generation, second.steps, second.total_s) == (5, 60, 1.2)
    assert [cause.split(":")[0] for cause in second.causes] == ["node1 silent", "node3 died"]
    assert second.seconds["silent"] == 5.0
    assert second.seconds["gather"] == pytest.approx(0.15)


def test_a_job_that_still_recovers() -> None:
    summary = summarize(until("broken"))
    assert summary.result == "running"
    assert (summary.recoveries[-1].generation, summary.recoveries[-1].total_s) == (None, None)
    assert len(summary.recoveries[-1].causes) == 2
    assert summary.goodput == round(17.5 / 19.0, 4)


def test_a_recovery_after_the_last_step_ends_with_the_job() -> None:
    events = [*until("regrouped", generation=2), *EVENTS[-3:]]
    (recovery,) = summarize(events).recoveries
    assert recovery.total_s == pytest.approx(38.0)
    assert "first step" not in recovery.seconds


def test_before_the_first_step() -> None:
    summary = summarize(until("listening"))
    assert (summary.result, summary.steps, summary.generations, summary.goodput) == ("running", 0, (), None)
    assert describe(summary).startswith("running at step 0")


def test_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "--log-dir", str(DATA)]) == 0
    assert capsys.readouterr().out == (DATA / "report.txt").read_text(encoding="utf-8")


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "--log-dir", str(DATA), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [recovery["generation"] for recovery in report["recoveries"]] == [2, 5]


def test_a_line_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    shutil.copy(DATA / "events.jsonl", tmp_path)
    with (tmp_path / "events.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"time": 18000')
    assert read_events(tmp_path) == EVENTS


def test_no_job_and_no_events(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "--log-dir", str(tmp_path)]) == 1
    (tmp_path / "events.jsonl").write_text("nonsense\n", encoding="utf-8")
    assert main(["report", "--log-dir", str(tmp_path)]) == 1
    assert "is not a file of events" in capsys.readouterr().err


def test_what_loops_of_scripts_have_lost() -> None:
    assert "lost:" not in describe(summarize(EVENTS)).replace("nodes lost", "")
    more = [
        {"kind": "samples lost", "steps": 20, "samples": 8, "total": 8},
        {"kind": "step dropped", "steps": 30, "total": 1, "why": "its loss was computed outside"},
        {"kind": "samples lost", "steps": 30, "samples": 24, "total": 32},
    ]
    where = {"time": 0.0, "generation": 1, "step": 20, "node": "node0"}
    summary = summarize([*EVENTS[:-1], *({**where, **event} for event in more), EVENTS[-1]])
    assert (summary.lost_samples, summary.dropped_steps) == (32, 1)
    assert "samples lost: 32 of batches that the script fed itself\nsteps dropped: 1" in describe(summary)
