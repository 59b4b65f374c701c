"""``lazarus report``: what happened in a job, from its events file."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megatron_lazarus.elastic.journal import EVENTS_FILE

Event = dict[str, Any]

PHASES = ("silent", "gather", "build", "state", "plan", "migrate", "first step")
"""Of a recovery, in order. ``silent`` comes before the detection: how long a node had not been heard."""

EVICTION_CAUSES = ("silent", "stuck", "build")
"""Why a node is declared dead that may still run: it was silent, held up the others, or did not build its groups."""


@dataclass(frozen=True)
class GenerationSummary:
    """One membership. ``cause``: why it came; ``steps``: how many were committed when it did; ``time``: since 1970."""

    number: int
    time: float
    nodes: tuple[str, ...]
    ranks: int
    cause: str
    steps: int


@dataclass(frozen=True)
class Recovery:
    """From the detection of a failure until training goes on.

    ``generation``: the one that works again, None if none came to it; further failures before that are in ``causes``.
    ``seconds``: by phase, of the last generation where several were tried, except that ``gather`` is the sum.
    ``total_s``: from the first detection to the first committed step, or other operation, of ``generation``.
    """

    generation: int | None
    causes: tuple[str, ...]
    steps: int
    seconds: dict[str, float]
    total_s: float | None


@dataclass(frozen=True)
class Summary:
    """A whole job. ``goodput``: share of ``wall_s`` spent in steps that committed; None before the first one.

    ``wall_s`` goes from the begin of the first committed step to the end of the last; a job that has not finished
    counts as far as the newest generation's first step. ``lost_samples`` of batches that scripts fed themselves were
    trained on by nobody; ``dropped_steps`` were begun by such scripts and given up.
    """

    result: str
    reason: str
    steps: int
    generations: tuple[GenerationSummary, ...] = ()
    recoveries: tuple[Recovery, ...] = ()
    evictions: tuple[str, ...] = ()
    joined: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    slow: tuple[str, ...] = ()
    goodput: float | None = None
    productive_s: float = 0.0
    wall_s: float = 0.0
    lost_samples: int = 0
    dropped_steps: int = 0


def read_events(log_dir: Path) -> list[Event]:
    """A job's events; a last line that is still being written is left out. Raises FileNotFoundError, ValueError."""
    path = log_dir / EVENTS_FILE
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    try:
        return [dict(json.loads(line)) for line in lines if line]
    except (json.JSONDecodeError, TypeError) as error:
        raise ValueError(f"{path} is not a file of events: {error}") from None


def summarize(events: Iterable[Event]) -> Summary:
    """The newest job of a file of events, in which an earlier job of the same folder may come first."""
    reader = _Reader()
    for event in _newest_job(list(events)):
        reader.read(event)
    return reader.summary()


def _newest_job(events: Sequence[Event]) -> Sequence[Event]:
    starts = [i for i, event in enumerate(events) if event["kind"] == "listening" and event["generation"] == 0]
    return events[starts[-1] :] if starts else events


@dataclass
class _OpenRecovery:
    """A recovery under way. ``gathering``: since when members leave a broken generation; None while one is built."""

    since: float
    steps: int
    causes: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    gathering: float | None = None
    gathered: float = 0.0
    silent: float = 0.0

    def closed(self, generation: int | None, end: float | None) -> Recovery:
        seconds = {name: round(self.seconds[name], 4) for name in PHASES if name in self.seconds}
        total_s = None if end is None else round(end - self.since, 4)
        return Recovery(generation, tuple(self.causes), self.steps, seconds, total_s)


class _Reader:
    """Goes through the events of one job."""

    def __init__(self) -> None:
        self._result, self._reason, self._steps = "running", "", 0
        self._generations: list[GenerationSummary] = []
        self._recoveries: list[Recovery] = []
        self._open: _OpenRecovery | None = None
        self._evictions: list[str] = []
        self._joined: list[str] = []
        self._left: list[str] = []
        self._lost: list[str] = []
        self._slow: dict[str, None] = {}
        self._lost_samples = self._dropped_steps = 0
        self._failures: list[str] = []
        self._why = ""
        self._nodes: tuple[str, ...] = ()
        self._times: Event = {}

    def read(self, event: Event) -> None:
        self._steps = max(self._steps, int(event["steps"] if "steps" in event else event["step"]))
        handle = {
            "failure": self._failure,
            "broken": self._broken,
            "generation": self._generation,
            "live": self._phases,
            "regrouped": self._phases,
            "working": self._working,
            "finished": self._finished,
            "left": self._node_left,
            "slow": self._node_slow,
            "samples lost": self._samples_lost,
            "step dropped": self._step_dropped,
            "completed": self._ended,
            "failed": self._ended,
        }.get(event["kind"])
        if handle is not None:
            handle(event)

    def _failure(self, event: Event) -> None:
        what = f"{event['node']} {event['cause']}: {event['detail']}"
        if event["cause"] in EVICTION_CAUSES:
            self._evictions.append(what)
        if not event["was_member"]:
            return
        self._lost.append(event["node"])
        self._failures.append(what)
        recovery = self._recovering(event)
        recovery.silent = max(recovery.silent, float(event["silent_s"]))

    def _broken(self, event: Event) -> None:
        self._recovering(event).gathering = float(event["time"])
        self._why = str(event["why"])

    def _recovering(self, event: Event) -> _OpenRecovery:
        if self._open is None:
            self._open = _OpenRecovery(float(event["time"]), max(self._steps, 0))
        return self._open

    def _generation(self, event: Event) -> None:
        nodes = tuple(event["nodes"])
        cause = "start"
        came = [node for node in nodes if node not in self._nodes]
        if (recovery := self._open) is not None:
            # Of a death and of what others felt of it, the death is the cause.
            causes, self._failures = self._failures or [self._why], []
            recovery.causes += causes
            cause = "failure: " + "; ".join(causes)
            if recovery.gathering is not None:
                recovery.gathered += float(event["time"]) - recovery.gathering
                recovery.gathering = None
            recovery.seconds = {"silent": recovery.silent, "gather": recovery.gathered}
        elif self._generations:
            gone = [node for node in self._nodes if node not in nodes]
            cause = ", ".join([f"{node} joined" for node in came] + [f"{node} left" for node in gone])
        if self._generations:
            self._joined += came
        self._nodes = nodes
        self._generations.append(
            GenerationSummary(
                int(event["generation"]), float(event["time"]), nodes, int(event["ranks"]), cause, max(self._steps, 0)
            )
        )

    def _phases(self, event: Event) -> None:
        if self._open is not None:
            measured = ("build", "state", "plan", "migrate")
            self._open.seconds.update(
                {name: float(event["seconds"][name]) for name in measured if name in event["seconds"]}
            )

    def _working(self, event: Event) -> None:
        self._times = event
        # A loop without an engine may send this event on its own, with less in it.
        if self._open is not None and "seconds" in event:
            self._open.seconds["first step"] = float(event["seconds"])
        self._recovered(event)

    def _recovered(self, event: Event) -> None:
        # A message sent just before the next failure may arrive after it.
        if self._open is not None and self._open.gathering is None:
            self._recoveries.append(self._open.closed(int(event["generation"]), float(event["time"])))
            self._open = None

    def _finished(self, event: Event) -> None:
        self._times = event
        self._recovered(event)

    def _node_left(self, event: Event) -> None:
        self._left.append(event["node"])

    def _node_slow(self, event: Event) -> None:
        self._slow[event["slow_node"]] = None

    def _samples_lost(self, event: Event) -> None:
        self._lost_samples = int(event["total"])

    def _step_dropped(self, event: Event) -> None:
        self._dropped_steps = int(event["total"])

    def _ended(self, event: Event) -> None:
        self._result, self._reason = str(event["kind"]), str(event["reason"] or "")

    def summary(self) -> Summary:
        if self._open is not None:
            self._open.causes += self._failures
            self._recoveries.append(self._open.closed(None, None))
        productive_s, wall_s = float(self._times.get("productive_s", 0.0)), float(self._times.get("wall_s", 0.0))
        return Summary(
            result=self._result,
            reason=self._reason,
            steps=max(self._steps, 0),
            generations=tuple(self._generations),
            recoveries=tuple(self._recoveries),
            evictions=tuple(self._evictions),
            joined=tuple(self._joined),
            left=tuple(self._left),
            lost=tuple(self._lost),
            slow=tuple(self._slow),
            goodput=round(productive_s / wall_s, 4) if wall_s > 0 else None,
            productive_s=productive_s,
            wall_s=wall_s,
            lost_samples=self._lost_samples,
            dropped_steps=self._dropped_steps,
        )


def describe(summary: Summary) -> str:
    """The summary as text for people."""
    reason = f": {summary.reason}" if summary.reason else ""
    lines = [f"{summary.result} at step {summary.steps}{reason}"]
    if summary.goodput is not None:
        lines.append(
            f"goodput {summary.goodput:.1%}: {summary.productive_s:.1f} of {summary.wall_s:.1f} s were spent in steps "
            "that committed"
        )
    lines.append(f"generations: {len(summary.generations)}")
    start = summary.generations[0].time if summary.generations else 0.0
    for generation in summary.generations:
        lines.append(
            f"  {generation.number:>3}  +{generation.time - start:7.1f} s  step {generation.steps:<6} "
            f"{len(generation.nodes)} nodes, {generation.ranks} ranks  {generation.cause}"
        )
    if summary.recoveries:
        lines.append("recoveries, seconds from the detection to the first step after it:")
        lines.append("  gen  step   " + "".join(f"{name:>11}" for name in PHASES) + f"{'total':>11}")
    for recovery in summary.recoveries:
        cells = "".join(_cell(recovery.seconds.get(name)) for name in PHASES) + _cell(recovery.total_s)
        lines.append(f"  {recovery.generation or '-':>3}  {recovery.steps:<7}" + cells)
    for name in ("lost", "joined", "left", "slow"):
        if nodes := getattr(summary, name):
            lines.append(f"nodes {name}: {', '.join(nodes)}")
    if summary.lost_samples:
        lines.append(f"samples lost: {summary.lost_samples} of batches that the script fed itself")
    if summary.dropped_steps:
        lines.append(f"steps dropped: {summary.dropped_steps}")
    lines += [f"evicted: {eviction}" for eviction in summary.evictions]
    return "\n".join(lines)


def _cell(seconds: float | None) -> str:
    return f"{'-' if seconds is None else format(seconds, '.3f'):>11}"


def add_parser(subparsers: Any) -> None:
    """Register the ``report`` subcommand."""
    parser = subparsers.add_parser("report", help="summarize a job: generations, recoveries, goodput")
    parser.add_argument("--log-dir", type=Path, default=Path("lazarus-logs"), help="the job's folder (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    try:
        summary = summarize(read_events(arguments.log_dir))
    except (OSError, ValueError) as error:
        print(f"lazarus report: {error}", file=sys.stderr)
        return 1
    print(json.dumps(asdict(summary), indent=1) if arguments.json else describe(summary))
    return 0
