"""Carries an engine from one generation of the world to the next, with nothing lost and nothing done twice.

Everything that ranks do together is an *operation* with a number: a step, an evaluation, a save. The last collective
of an operation completes on one rank only if every rank has contributed all it had to. So after a failure the members
compare numbers: where any of them has completed the operation in progress, the others complete it with its outcome (for
a step: the vote); where none has, all drop it and do it again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megatron_lazarus import dense_state
from megatron_lazarus.elastic.interfaces import use_interface
from megatron_lazarus.elastic.journal import ENDED_WELL
from megatron_lazarus.elastic.membership import Generation, GenerationBroken, JobEnded, Membership, NodeDrained
from megatron_lazarus.elastic.process_groups import BuildFailed, ProcessGroups, is_collective_error
from megatron_lazarus.handshake import Report
from megatron_lazarus.json_exchange import broadcast_bytes, broadcast_json, gather_json
from megatron_lazarus.lost_experts import hold_everything
from megatron_lazarus.placing import plan_for
from megatron_lazarus.planning.mapping import map_plan
from megatron_lazarus.planning.plan import Plan
from megatron_lazarus.repoint import repoint
from megatron_lazarus.reporting.goodput import Goodput, Laps
from megatron_lazarus.stragglers import StragglerReports
from megatron_lazarus.world_change import agree_on_change

logger = logging.getLogger(__name__)

REGROUP_LIMIT_S = 300.0
"""How long a worker waits for the next generation: longer than any join window."""

PUBLISH_LIMIT_S = 30.0
"""How long the coordinator may take to say whether a checkpoint may be published."""

Outcome = TypeVar("Outcome")


class Elastic:
    """The link between an engine and its membership.

    ``operation`` numbers what is in progress; ``outcome`` (JSON) is that of the last completed one.
    """

    def __init__(self, membership: Membership, backend: str, device: torch.device) -> None:
        self.membership = membership
        config = membership.config
        use_interface(config.interface, membership.local_address)
        # The eviction of a stuck member must come first; the group's own limit only backs it up.
        limit = config.collective_timeout_s + config.heartbeat_timeout_s
        self.groups = ProcessGroups(backend, limit, device=device, spared=membership.own_sockets)
        membership.on_broken(self.groups.unblock)
        self.operation: int | None = None
        self.outcome: Any = None
        self.change_due = False
        self.joined_running = self._has_trained = False
        self.goodput = Goodput()
        self._told_working = 0
        self._in_step = True
        self._finished_elsewhere: Any = None
        self._saved: list[int] = []
        self._collectives = 0
        self._phase = "start"
        self._engine: Any = None

    @property
    def _generation(self) -> Generation:
        if self.membership.generation is None:
            raise RuntimeError("this process has not joined a generation yet")
        return self.membership.generation

    @property
    def is_newcomer(self) -> bool:
        """Whether this process came into a run that had begun, and has done none of its steps yet."""
        return self.joined_running and not self._has_trained

    @property
    def present(self) -> frozenset[str]:
        """The ranks of this generation, by names that they keep as long as they live."""
        return frozenset(
            f"{member.node}.{rank}, here since generation {member.joined}"
            for member in self._generation.members
            for rank in range(member.ranks)
        )

    @property
    def _begins(self) -> int | None:
        """The number of the step that is done next, -1 if this process has no state; None: what is next is no step."""
        if not self._in_step:
            return None
        return -1 if self.operation is None else self.operation

    # -- entering generations -----------------------------------------------------------------------------------

    def attach(self, engine: Any) -> None:
        """Bind to ``engine``, which has no place in a world yet, and bring it into the first generation."""
        self._engine = engine
        engine.experts.peers.observe = self._observe
        number = engine._checkpoint.saver.generation = lambda: self._generation.number
        engine._checkpoint.saver.may_publish = lambda: self.membership.may_publish(number(), PUBLISH_LIMIT_S)
        engine._checkpoint.history.report = self.membership.event
        if threading.current_thread() is threading.main_thread():
            self.membership.drain_on_signals()
        engine.rebalancer.report = engine.script_loop.tell = self.membership.event
        engine.protocol.wants_change = lambda: bool(self.membership.pending)
        if dist.is_initialized():
            # The private world in which the engine was built.
            self.groups.break_groups()
        try:
            generation = self.membership.join(REGROUP_LIMIT_S)
        except JobEnded as ended:
            if ended.result["status"] not in ENDED_WELL:
                raise
            # A spare node that was not needed has not failed.
            logger.info("%s", ended)
            raise SystemExit(0) from None
        self._enter(generation, "join")
        # With none completed yet, all begin their scripts alike.
        self.joined_running = bool(self.operation)

    def _enter(self, generation: Generation, why: str) -> None:
        """Build a generation and settle in it; if members fail meanwhile, the one after it, and so on."""
        started = time.monotonic()
        while True:
            try:
                times = self._settle(generation)
                break
            except (RuntimeError, BuildFailed) as error:
                generation = self._next(error)
        self._note("forward")
        if generation.rank == 0:
            times["total"] = time.monotonic() - started
            seconds = {name: round(value, 4) for name, value in times.items()}
            step = self._engine.global_steps
            self.membership.event("regrouped", why=why, world_size=generation.world_size, seconds=seconds)
            logger.info(
                "generation %d: %d ranks on %d nodes at step %d (%s), regrouped in %.2f s",
                generation.number,
                generation.world_size,
                len(generation.members),
                step,
                why,
                times["total"],
            )

    def _next(self, error: BaseException) -> Generation:
        """Leave a broken generation and wait for the next one; raises ``error`` if it is this rank's own failure."""
        ours = not isinstance(error, (BuildFailed, GenerationBroken)) and not is_collective_error(error)
        if ours:
            self.membership.report_failure(error, own=True)
            raise error
        logger.info("%s: %s", self.membership.place, error)
        self.membership.report_failure(error)
        self.groups.break_groups()
        return self.membership.next_generation(REGROUP_LIMIT_S, begins=self._begins)

    def _settle(self, generation: Generation) -> dict[str, float]:
        """Agree on the committed step, place experts, give newcomers their state; returns seconds by phase."""
        engine = self._engine
        clock = Laps()
        self.groups.build(generation)
        self.membership.built()
        # Who stands furthest behind is told by these numbers, so all must count from the same moment.
        self._collectives = 0
        repoint(engine.deepspeed_engine, generation.rank, generation.world_size, engine.sizes.micro_batches)
        clock.lap("build")
        # Nothing that was being saved goes on; what is complete, is complete for all.
        self._saved = engine._checkpoint.interrupt()
        reports = self._reports()
        engine._checkpoint.settle({number for report in reports for number in report.saves})
        settled = [rank for rank, report in enumerate(reports) if report.operation is not None]
        newest = max((reports[rank] for rank in settled), key=lambda report: report.operation or 0, default=None)
        self._agree(newest)
        source = settled[0] if settled else 0
        if newest is not None:
            # Alike on all: a member may have missed a save that the others have begun, and a newcomer knows of none.
            history = engine._checkpoint.history
            history.restore(broadcast_json(history.to_json(), reports.index(newest)))
        if len(settled) < len(reports):
            self._give_state(source, newest, reports[source].counted, generation.rank)
        clock.lap("state")
        held = hold_everything(engine, reports, self._reports, generation)
        plan = self._plan(source, held, generation)
        clock.lap("plan")
        engine.experts.change_plan(plan, generation.rank, held)
        engine.settle()
        engine.script_loop.settle(
            [report.script if report.operation is not None else None for report in reports],
            [newest is not None and report.operation == newest.operation for report in reports],
        )
        engine.rebalancer.settled(engine.global_steps)
        watch = StragglerReports(self.membership.event, generation.nodes, generation.rank_nodes, engine.experts)
        engine.protocol.observe_waits = watch if generation.rank == 0 else lambda waited: None
        clock.lap("migrate")
        return clock.seconds

    def _reports(self) -> list[Report]:
        mine = {
            "operation": self.operation,
            "outcome": self.outcome,
            "saves": self._saved,
            "holdings": self._engine.experts.holdings,
            "counted": self.goodput.since_begin(),
            "script": self._engine.script_loop.report(),
        }
        return [Report.from_json(entry) for entry in gather_json(mine)]

    def _agree(self, newest: Report | None) -> None:
        """Complete the operation in progress with what the ``newest`` member got of it, or drop it."""
        if self.operation is None or newest is None:
            return
        behind = (newest.operation or 0) - self.operation
        if behind > 1:
            raise AssertionError(f"{self.membership.place}: {behind} operations behind another member")
        if behind == 1:
            self._finished_elsewhere = newest.outcome
            if "vote" in newest.outcome:
                self._engine.protocol.decide_from(newest.outcome["vote"])
            self.completed(newest.outcome)
        else:
            self._engine.protocol.abandon()

    def _give_state(self, source: int, newest: Report | None, counted: list[float], rank: int) -> None:
        """Ranks without state take the dense part, and their place in the run, over from ``source``."""
        data = broadcast_bytes(dense_state.pack(self._engine) if rank == source else None, source)
        if self.operation is None:
            if rank != source:
                dense_state.unpack(data, self._engine)
            self.operation = 0
            if newest is not None:
                self.operation, self.outcome = newest.operation, newest.outcome
                self.goodput.adopt(counted)

    def _plan(self, planner: int, held: Plan, generation: Generation) -> Plan:
        """The plan that rank ``planner`` makes for this generation, and whether a change is due, alike on all ranks."""
        proposal: Any = None
        if generation.rank == planner:
            engine = self._engine
            plan = plan_for(engine.experts.loads, engine.config.experts, generation.rank_nodes)
            # Whoever comes or goes need not wait for the step that is repeated now.
            due = self.change_due or bool(self.membership.pending)
            proposal = {"plan": map_plan(held, plan).to_json(), "change_due": due}
        decided = broadcast_json(proposal, planner)
        self.change_due = decided["change_due"]
        return Plan.from_json(decided["plan"])

    # -- operations ---------------------------------------------------------------------------------------------

    def run(
        self,
        attempt: Callable[[], Outcome],
        outcome: Callable[[Outcome], dict[str, Any]],
        given: Callable[[dict[str, Any]], Outcome],
        *,
        between_steps: bool = False,
    ) -> Outcome:
        """Run one operation until it is complete, through as many generations as that takes.

        ``attempt`` does it; ``outcome`` makes JSON of its result, from which ``given`` makes the result on a rank
        where another one has completed it. ``between_steps``: before each attempt the world may change. Raises what
        ``attempt`` raises of its own, and RuntimeError where the members are not about to do the same.
        """
        self._has_trained = self._has_trained or between_steps
        if self.is_newcomer:
            raise RuntimeError(
                "this process came into a running job, whose members are about to take a step: its first call must be "
                "train_batch, or a forward in training (engine.joined_running tells)"
            )
        while True:
            self._in_step = between_steps
            if between_steps:
                self.before_step()
            started = time.monotonic()
            try:
                result = attempt()
            except Exception as error:
                if (got := self.survive(error, in_step=between_steps)) is not None:
                    return given(got)
            else:
                self.completed(outcome(result), time.monotonic() - started)
                return result

    def completed(self, outcome: dict[str, Any], seconds: float | None = None) -> None:
        """An operation is complete: here after so many seconds, or on another member (None)."""
        assert self.operation is not None
        self.operation += 1
        self.outcome = outcome
        if "vote" in outcome:
            self.change_due = bool(outcome["vote"]["change"])
            for layer in self._engine.experts.layers:
                # A committed step: what the constructor made must never come back.
                layer.experts.forget_initial()
        if "vote" in outcome or "dropped" in outcome:
            self._engine.script_loop.ended()
        self._note("forward")
        if seconds is not None:
            self._count("vote" in outcome, seconds)

    def _count(self, is_step: bool, seconds: float) -> None:
        if is_step:
            self.goodput.step(seconds)
        generation = self.membership.generation
        assert generation is not None
        if generation.rank == 0 and self._told_working != generation.number:
            self._told_working = generation.number
            first = "step" if is_step else "other"
            steps = self._engine.global_steps
            self.membership.event(
                "working", steps=steps, first=first, seconds=round(seconds, 4), **self.goodput.to_json()
            )

    def survive(self, error: Exception, in_step: bool = True) -> Any:
        """After an exception in the operation in progress: go on in another generation.

        Returns the operation's outcome where other members have completed it; None: it is to be done again, after
        ``before_step`` if it is a step. Raises ``error`` if it is this rank's own.
        """
        self._in_step, self._finished_elsewhere = in_step, None
        self._enter(self._next(error), type(error).__name__)
        return self._finished_elsewhere

    def before_step(self) -> None:
        """Change the world where that is due, and the places of experts: a step comes next."""
        self._in_step = self._has_trained = True
        self._change_world()
        rebalancer = self._engine.rebalancer
        while rebalancer.due(self._engine.global_steps):
            try:
                rebalancer.run(self._engine.global_steps)
            except Exception as error:
                # Whoever is left has places planned anew.
                self._enter(self._next(error), type(error).__name__)
                self._change_world()

    def _change_world(self) -> None:
        """Between two steps, where it is due: admit who waits, let go who leaves.

        Not an operation, which some could have completed and others not: whoever has agreed on the change leaves this
        generation in any case. If the others could not, all meet in the next one, and may find the change due again.
        """
        while self.change_due:
            try:
                joining, leaving, short = self._agree_on_change()
            except Exception as error:
                self._enter(self._next(error), type(error).__name__)
                continue
            self.change_due = False
            if not joining and not leaving and not short:
                return
            self.groups.break_groups()
            if self.membership.node in leaving:
                self.membership.leave()
                raise NodeDrained
            why = "join" if joining else "drain"
            self._enter(self.membership.next_generation(REGROUP_LIMIT_S, joining, self._begins), why)

    def _agree_on_change(self) -> tuple[list[str], list[str], bool]:
        return agree_on_change(self._engine, self.membership.pending, self._generation)

    def finish(self, value: Any = None) -> dict[str, Any]:
        """Wait until all members have finished and return the job's result."""
        while True:
            if self._engine.rank == 0:
                self.membership.event("finished", steps=self._engine.global_steps, **self.goodput.to_json())
            try:
                result = self.membership.finish(REGROUP_LIMIT_S, value)
            except GenerationBroken as error:
                self._enter(self._next(error), "finish")
                continue
            self.groups.break_groups()
            return result

    # -- progress -----------------------------------------------------------------------------------------------

    def _observe(self, waiting: bool) -> None:
        self._collectives += waiting
        self._note("collective" if waiting else "forward")

    def _note(self, phase: str) -> None:
        self.membership.note(self._engine.global_steps, phase, self._collectives)
