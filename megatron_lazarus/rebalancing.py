"""Looks, every so many steps, whether other replica counts would make steps faster, and moves experts if it pays.

A look comes before its time where loads change suddenly. A step takes as long as its busiest rank. One rank decides,
because only it has the times it decides by; it sends the plan with its hash to the others. What was decided and why,
and what came of it, is in the events file.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_lazarus.config import ExpertsConfig
from megatron_lazarus.drift import PATIENCE, DriftWatch
from megatron_lazarus.expert_state import ExpertState
from megatron_lazarus.json_exchange import broadcast_json
from megatron_lazarus.moe.dispatch import Quotas
from megatron_lazarus.moe.expert_clock import BACKWARD_COST
from megatron_lazarus.placing import plan_for
from megatron_lazarus.planning.mapping import map_plan
from megatron_lazarus.planning.plan import Plan

logger = logging.getLogger(__name__)

Loads = Sequence[npt.NDArray[np.float64]]

UNMEASURED_BYTES_PER_S = 1e8
"""How fast records are taken to move until some have: about 1 Gbit/s."""


def busiest_tokens(plan: Plan, loads: Loads, quotas: Quotas) -> npt.NDArray[np.float64]:
    """Tokens of the busiest rank of each layer, shape [layers], and what a rank has in the mean: [layers, 2].

    ``loads[layer]`` [experts] are tokens a step, shared over replicas by ``quotas``.
    """
    rows = []
    for load, placement in zip(loads, plan.layers, strict=True):
        tokens = np.rint(load).astype(np.int64)
        ranks = quotas(tokens, placement.replica_counts()).sum(axis=0)
        rows.append((ranks.max(), ranks.mean()))
    return np.array(rows, dtype=np.float64).reshape(-1, 2)


@dataclass(frozen=True)
class Look:
    """One decision. Seconds are of the whole interval until the next one, but ``step_s`` is of a step.

    ``balance``: tokens of the busiest rank over the mean, all layers together, with the plan as it is and with the new
    one; 1 where not even that would pay, and none was made. ``observed_s``: what the change before this one has saved
    over its interval; None if there was none.
    ``early``: before its time, because loads had changed.
    """

    adopted: bool
    why: str
    step_s: float
    gain_s: float
    cost_s: float
    balance: tuple[float, float]
    observed_s: float | None = None
    early: bool = False


def decide(
    before: npt.NDArray[np.float64],
    after: npt.NDArray[np.float64],
    *,
    seconds_per_token: float,
    move_s: float,
    step_s: float,
    interval: int,
    min_gain: float,
) -> Look:
    """Whether a change pays. ``before`` and ``after`` [layers, 2] are ``busiest_tokens`` of the two plans.

    It must save, after the ``move_s`` it takes, ``min_gain`` of the interval's time: so a plan that is as good but for
    noise in the loads is not adopted, and plans do not flutter.
    """
    gain_s = interval * float((before - after)[:, 0].sum()) * seconds_per_token
    wanted = min_gain * interval * step_s
    balance = (_balance(before), _balance(after))
    adopted = gain_s - move_s > wanted
    sign = ">" if adopted else "<="
    why = f"saves {gain_s:.3g} s - moving {move_s:.3g} s {sign} {wanted:.3g} s wanted"
    return Look(adopted, why, step_s, gain_s, move_s, balance)


class Rebalancer:
    """Decides for one engine, every ``rebalance_interval`` steps, between two of them.

    ``report(kind, **fields)`` adds to the events file; it is called on rank 0 only.
    """

    def __init__(self, ds_engine: Any, experts: ExpertState, config: ExpertsConfig) -> None:
        self._engine, self._experts, self._config = ds_engine, experts, config
        self.report: Callable[..., None] = lambda kind, **fields: None
        self._interval = config.rebalance_interval
        self._settled_at = 0
        self._early_at: int | None = None
        self._watch = DriftWatch(config.rebalance_min_gain)
        self._times: deque[float] = deque(maxlen=max(PATIENCE, self._interval or 0))
        self._usual_s: float | None = None
        self._seconds, self._tokens, self._seconds_per_token = 0.0, 0, 0.0
        self._bytes_per_s: float | None = None
        self._adopted: Look | None = None

    def observe(self, step_s: float) -> None:
        """To be called after every step with the seconds it took, without what the script does between steps."""
        self._times.append(step_s)
        for layer in self._experts.layers:
            seconds, tokens = layer.clock.take()
            self._seconds, self._tokens = self._seconds + seconds, self._tokens + tokens
        if self._tokens:
            self._seconds_per_token = (1 + BACKWARD_COST) * self._seconds / self._tokens

    def settled(self, step: int) -> None:
        """Experts were just placed, before this step, for another reason."""
        self._settled_at, self._early_at = step, None
        self._forget_times()
        self._adopted = None

    def wants_look(self) -> bool:
        """Whether this rank, for all, wants a look before the next step. Called when all of a step's tokens are known.

        It is for rank 0 to say, because only one rank may: the vote of the step brings it to the others.
        """
        experts = self._experts
        if experts.rank != 0 or self._never:
            return False
        if self._watch.foreseen is None:
            self._watch.foreseen = _balance(busiest_tokens(experts.plan, experts.loads, experts.quotas))
        step_s = statistics.median(self._times) if self._times else self._usual_s
        if step_s is None:
            return False
        shares = busiest_tokens(experts.plan, [layer.load.astype(float) for layer in experts.layers], experts.quotas)
        return self._watch.drifts(shares, self._seconds_per_token, step_s)

    def look_before(self, step: int) -> None:
        """Rank 0 wants a look before ``step``, as every rank has learnt."""
        self._early_at = step

    @property
    def _never(self) -> bool:
        return self._interval is None or self._experts.plan.world_size == 1

    def due(self, step: int) -> bool:
        """Whether to look before ``step``; alike on all ranks."""
        if self._interval is None or self._never or step == self._settled_at:
            return False
        return step % self._interval == 0 or step == self._early_at

    def run(self, step: int) -> None:
        """Decide, and move experts if that pays. Every rank of the world calls it before the same step."""
        started = time.monotonic()
        early = step == self._early_at
        if early:
            self._experts.forget_old_loads()
        proposal: dict[str, Any] | None = None
        if self._experts.rank == 0:
            shares = busiest_tokens(self._experts.plan, self._experts.loads, self._experts.quotas)
            look, plan = self._look(shares, early)
            self._tell(look, shares, step)
            proposal = {"plan": plan.to_json(), "hash": plan.digest()} if look.adopted else {"plan": None}
        proposal = broadcast_json(proposal, 0)
        self._settled_at = step
        if proposal["plan"] is not None:
            plan = Plan.from_json(proposal["plan"])
            if plan.digest() != proposal["hash"]:
                raise RuntimeError(f"rank {self._experts.rank}, step {step}: the plan to adopt came with another hash")
            begun = time.monotonic()
            self._experts.change_plan(plan, self._experts.rank)
            if self._experts.last_moved_bytes:
                self._bytes_per_s = self._experts.last_moved_bytes / (time.monotonic() - begun)
        self._forget_times()
        if early:
            self._watch.looked(time.monotonic() - started)

    def _forget_times(self) -> None:
        if self._times:
            self._usual_s = statistics.median(self._times)
        self._times.clear()
        self._seconds, self._tokens = 0.0, 0
        self._watch.begin()

    def _look(self, shares: npt.NDArray[np.float64], early: bool) -> tuple[Look, Plan]:
        """``shares``: of the plan in force, see ``busiest_tokens``."""
        experts = self._experts
        assert self._interval is not None
        # Only steps since the loads changed tell what a change of places would save, and only those before, what the
        # last one has saved.
        times = list(self._times)
        before, since = (times[:-PATIENCE], times[-PATIENCE:]) if early else (times, times)
        step_s = statistics.median(since) if since else 0.0
        observed_s = None
        if self._adopted is not None and before:
            observed_s = (self._adopted.step_s - statistics.median(before)) * self._interval
        rule: dict[str, Any] = {
            "seconds_per_token": self._seconds_per_token,
            "step_s": step_s,
            "interval": self._interval,
            "min_gain": self._config.rebalance_min_gain,
        }
        plan = experts.plan
        # No plan gives the busiest rank less than the mean: mostly that is not enough, and none need be made.
        look = decide(shares, np.repeat(shares[:, 1:], 2, axis=1), move_s=0.0, **rule)
        if look.adopted:
            plan = map_plan(plan, plan_for(experts.loads, self._config, plan.rank_nodes))
            move_s = experts.moved_bytes(plan) / (self._bytes_per_s or UNMEASURED_BYTES_PER_S)
            look = decide(shares, busiest_tokens(plan, experts.loads, experts.quotas), move_s=move_s, **rule)
        look = replace(look, observed_s=observed_s, early=early)
        self._adopted = look if look.adopted else None
        return look, plan

    def _tell(self, look: Look, shares: npt.NDArray[np.float64], step: int) -> None:
        logger.info("experts %s: %s", "move" if look.adopted else "stay", look.why)
        self.report("rebalance", steps=step, **{name: _rounded(value) for name, value in asdict(look).items()})
        for index, (load, (most, mean)) in enumerate(zip(self._experts.loads, shares.tolist(), strict=True)):
            balance = most / mean if mean else 1.0
            self.report(
                "load", steps=step, layer=index, balance=round(balance, 3), tokens=np.rint(load).astype(int).tolist()
            )
        self._write_monitor(shares)

    def _write_monitor(self, shares: npt.NDArray[np.float64]) -> None:
        if not self._engine.monitor.enabled:
            return
        samples = self._engine.global_samples
        events = []
        for index, (load, (most, mean)) in enumerate(zip(self._experts.loads, shares.tolist(), strict=True)):
            events.append((f"Train/Experts/layer{index}/busiest_rank_over_mean", most / mean if mean else 1.0, samples))
            events += [
                (f"Train/Experts/layer{index}/tokens/expert{expert}", float(tokens), samples)
                for expert, tokens in enumerate(load)
            ]
        self._engine.monitor.write_events(events)


def _balance(shares: npt.NDArray[np.float64]) -> float:
    """Tokens of the busiest rank over the mean, all layers together."""
    return float(shares[:, 0].sum()) / max(float(shares[:, 1].sum()), 1.0)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.4g}")
    return [_rounded(item) for item in value] if isinstance(value, tuple) else value
