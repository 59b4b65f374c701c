"""Looks, every so many steps, whether other replica counts would make steps faster, and moves experts if it pays.

A step takes as long as its busiest rank. One rank decides, because only it has the times it decides by; it sends the
plan with its hash to the others. What was decided and why, and what came of it, is in the events file.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_lazarus.config import ExpertsConfig
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
    one. ``observed_s``: what the change before this one has saved over its interval; None if there was none.
    """

    adopted: bool
    why: str
    step_s: float
    gain_s: float
    cost_s: float
    balance: tuple[float, float]
    observed_s: float | None = None


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
    mean = max(float(before[:, 1].sum()), 1.0)
    balance = (float(before[:, 0].sum()) / mean, float(after[:, 0].sum()) / mean)
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
        self._times: deque[float] = deque(maxlen=self._interval or 1)
        self._seconds, self._tokens = 0.0, 0
        self._bytes_per_s: float | None = None
        self._adopted: Look | None = None

    def observe(self, step_s: float) -> None:
        """To be called after every step with the seconds it took, without what the script does between steps."""
        self._times.append(step_s)
        for layer in self._experts.layers:
            seconds, tokens = layer.clock.take()
            self._seconds, self._tokens = self._seconds + seconds, self._tokens + tokens

    def settled(self, step: int) -> None:
        """Experts were just placed, before this step, for another reason."""
        self._settled_at = step
        self._forget_times()
        self._adopted = None

    def due(self, step: int) -> bool:
        """Whether to look before ``step``; alike on all ranks."""
        if self._interval is None or self._experts.plan.world_size == 1:
            return False
        return step % self._interval == 0 and step != self._settled_at

    def run(self, step: int) -> None:
        """Decide, and move experts if that pays. Every rank of the world calls it before the same step."""
        proposal: dict[str, Any] | None = None
        if self._experts.rank == 0:
            shares = busiest_tokens(self._experts.plan, self._experts.loads, self._experts.quotas)
            look, plan = self._look(shares)
            self._tell(look, shares, step)
            proposal = {"plan": plan.to_json(), "hash": plan.digest()} if look.adopted else {"plan": None}
        proposal = broadcast_json(proposal, 0)
        self._settled_at = step
        if proposal["plan"] is not None:
            plan = Plan.from_json(proposal["plan"])
            if plan.digest() != proposal["hash"]:
                raise RuntimeError(f"rank {self._experts.rank}, step {step}: the plan to adopt came with another hash")
            started = time.monotonic()
            self._experts.change_plan(plan, self._experts.rank)
            if self._experts.last_moved_bytes:
                self._bytes_per_s = self._experts.last_moved_bytes / (time.monotonic() - started)
        self._forget_times()

    def _forget_times(self) -> None:
        self._times.clear()
        self._seconds, self._tokens = 0.0, 0

    def _look(self, shares: npt.NDArray[np.float64]) -> tuple[Look, Plan]:
        """``shares``: of the plan in force, see ``busiest_tokens``."""
        experts, config = self._experts, self._config
        assert self._interval is not None
        plan = map_plan(experts.plan, plan_for(experts.loads, config, experts.plan.rank_nodes))
        step_s = statistics.median(self._times) if self._times else 0.0
        bytes_per_s = self._bytes_per_s or UNMEASURED_BYTES_PER_S
        look = decide(
            shares,
            busiest_tokens(plan, experts.loads, experts.quotas),
            seconds_per_token=(1 + BACKWARD_COST) * self._seconds / self._tokens if self._tokens else 0.0,
            move_s=experts.moved_bytes(plan) / bytes_per_s,
            step_s=step_s,
            interval=self._interval,
            min_gain=config.rebalance_min_gain,
        )
        if self._adopted is not None:
            observed = (self._adopted.step_s - step_s) * self._interval
            look = Look(**{**asdict(look), "observed_s": observed})
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


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.4g}")
    return [_rounded(item) for item in value] if isinstance(value, tuple) else value
