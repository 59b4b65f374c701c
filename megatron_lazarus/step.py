"""The step protocol: reduce, vote, then commit or skip. After the vote nothing waits for another rank any more.

The vote is one all-reduce of [dense norm squared, expert norm squared, non-finite flag, change flag, look flag, saves,
losses, seconds that each rank has waited]. It starts only when all gradients are reduced; where it completes on any
rank, every rank holds all it needs to apply the step.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_lazarus.config import BatchSizes
from megatron_lazarus.expert_state import ExpertState
from megatron_lazarus.guard import LossGuard

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepResult:
    """One global step. ``loss`` and ``metrics`` are means over the M micro-batches, equal on every rank.

    ``step`` counts from 0; ``skipped`` steps changed nothing but the counters; ``grad_norm`` is before clipping.
    """

    step: int
    loss: float
    metrics: dict[str, float]
    grad_norm: float
    skipped: bool


@dataclass(frozen=True)
class Vote:
    """What the all-reduce of a step gave, alike on every rank. ``change``: some rank asks for a change of the world.

    ``look``: rank 0 wants a look at the places of experts before the next step. ``saves``: what rank 0 says of
    checkpoints in flight.
    """

    step: int
    samples: str
    dense_squared: float
    expert_squared: float
    nonfinite: bool
    change: bool
    look: bool
    means: dict[str, float]
    saves: list[float]


class Checkpoints(Protocol):
    """What checkpoints have to do with a step."""

    def signal(self) -> list[float]:
        """Two numbers that this rank adds to the vote's ``saves``."""

    def hear(self, signal: list[float]) -> None:
        """The vote's ``saves``."""

    def before_update(self) -> None:
        """Return when parameters and optimizer state may change."""

    def committed(self, loads: Sequence[Any]) -> None:
        """The step is applied; the tokens each expert got in it, by layer."""


class StepProtocol:
    """Finishes the steps of one engine.

    ``last_vote``: the newest vote that completed here. ``reduced_step``: the step whose gradients are all reduced
    here and not yet applied. Between them they tell what a recovery must finish (see ``recovery``).
    ``observe_waits`` is given the seconds that each rank has waited for others in a step, as its vote completes.
    """

    def __init__(
        self, ds_engine: Any, experts: ExpertState, sizes: BatchSizes, guard: LossGuard, gradient_clipping: float
    ) -> None:
        self._engine, self._experts, self._sizes = ds_engine, experts, sizes
        self._guard, self._clip = guard, gradient_clipping
        self._dense = [p for p in ds_engine.module.parameters() if p.requires_grad and p.numel()]
        self.wants_change: Callable[[], bool] = lambda: False
        self.wants_look: Callable[[], bool] = lambda: False
        self.look_before: Callable[[int], None] = lambda step: None
        self.observe_waits: Callable[[list[float]], None] = lambda waited: None
        self.checkpoint: Checkpoints | None = None
        self.last_vote: Vote | None = None
        self.reduced_step: int | None = None
        self.last_result: StepResult | None = None
        self.grad_norm: float | None = None
        self._lr_kwargs: Mapping[str, Any] | None = None

    def finish(
        self, sums: dict[str, Tensor], count: int, samples: str, lr_kwargs: Mapping[str, Any] | None = None
    ) -> StepResult:
        """Sum replicas' gradients, vote, decide. DeepSpeed has reduced the dense gradients in its last backward."""
        step = self._engine.global_steps
        self._lr_kwargs = lr_kwargs
        self._experts.reduce_gradients()
        self.reduced_step = step
        vote = self._vote(step, sums, count, samples)
        self.last_vote = vote
        return self.decide(vote)

    def _vote(self, step: int, sums: dict[str, Tensor], count: int, samples: str) -> Vote:
        device = self._engine.device
        dense = [p.grad for p in self._dense if p.grad is not None]
        squares = [_squared_norm(some, device) for some in (dense, self._experts.norm_gradients)]
        finite = torch.isfinite(squares[0]) & torch.isfinite(squares[1])
        if self._experts.rank != 0:
            squares[0] = torch.zeros_like(squares[0])
        names = sorted(sums)
        wants = [torch.tensor(float(asks()), dtype=torch.float64) for asks in (self.wants_change, self.wants_look)]
        signal = self.checkpoint.signal() if self.checkpoint is not None else [0.0, 0.0]
        saves = [torch.tensor(value, dtype=torch.float64) for value in signal]
        waited = torch.zeros(self._experts.plan.world_size, dtype=torch.float64)
        waited[self._experts.rank] = self._experts.peers.take_waited_s()
        values = [*squares, (~finite).double(), *wants, *saves, *(sums[name] for name in names)]
        totals = self.all_reduce(values, waited)
        means = {name: total / count for name, total in zip(names, totals[7 : len(values)], strict=True)}
        self.observe_waits(totals[len(values) :])
        nonfinite, change, look = (total != 0 for total in totals[2:5])
        return Vote(step, samples, totals[0], totals[1], nonfinite, change, look, means, totals[5:7])

    def decide(self, vote: Vote) -> StepResult:
        """Commit or skip the step as its vote says. Local: no other rank is waited for.

        Raises StepRefused where the guard's policy is to stop.
        """
        means = dict(vote.means)
        loss = means.pop("loss")
        if self.checkpoint is not None:
            self.checkpoint.hear(vote.saves)
        if vote.look:
            self.look_before(vote.step + 1)
        squared = vote.dense_squared + vote.expert_squared
        norm = math.sqrt(squared) if squared >= 0 else math.nan
        refused = self._guard.refuses(vote.step, loss, norm, not vote.nonfinite, vote.samples)
        if refused is None:
            self._commit(norm)
        else:
            logger.log(logging.WARNING if self._experts.rank == 0 else logging.DEBUG, "%s: skipped", refused)
            self._skip()
        self.grad_norm = norm
        self.reduced_step = None
        self._experts.clear_step()
        self.last_result = StepResult(vote.step, loss, means, norm, skipped=refused is not None)
        return self.last_result

    def result(self) -> StepResult:
        """The last step's. Raises RuntimeError before the first one."""
        if self.last_result is None:
            raise RuntimeError("no step has been decided yet")
        return self.last_result

    def vote_json(self) -> dict[str, Any]:
        """The last vote, for ``decide_from`` on another rank."""
        if self.last_vote is None:
            raise RuntimeError("no vote has completed yet")
        return asdict(self.last_vote)

    def decide_from(self, vote: dict[str, Any]) -> None:
        """Decide the step whose vote completed on another rank only: all gradients are reduced here too."""
        if self.reduced_step != vote["step"]:
            raise AssertionError(f"vote of step {vote['step']}, but gradients of step {self.reduced_step} are reduced")
        self.last_vote = Vote(**vote)
        self.decide(self.last_vote)

    def _commit(self, norm: float) -> None:
        if self._clip > 0 and norm > self._clip:
            factor = self._clip / (norm + 1e-6)
            torch._foreach_mul_([p.grad for p in self._dense if p.grad is not None], factor)
            self._experts.scale_gradients(factor)
        if self.checkpoint is not None:
            self.checkpoint.before_update()
        # Experts first: DeepSpeed's step ends by advancing the learning rate.
        self._experts.commit()
        self._engine.step(self._lr_kwargs)
        if self.checkpoint is not None:
            self.checkpoint.committed([layer.load for layer in self._experts.layers])

    def _skip(self) -> None:
        """What DeepSpeed does at an overflow: counters advance, model, optimizer and schedule do not."""
        engine = self._engine
        engine.zero_grad()
        engine.skipped_steps += 1
        engine.global_steps += 1
        engine.global_samples += self._sizes.global_batch_size
        engine.micro_steps += 1
        engine._step_applied = False

    def abandon(self) -> None:
        """Drop whatever was computed of the step in progress."""
        self._engine.zero_grad()
        self._experts.clear_step()
        self.reduced_step = None

    def all_reduce(self, values: Sequence[Tensor], more: Tensor | None = None) -> list[float]:
        """Sums over ranks of scalars, and of the elements of the vector ``more``, in float64."""
        device = self._engine.device
        vector = torch.stack([value.to(device, torch.float64) for value in values])
        if more is not None:
            vector = torch.cat([vector, more.to(device, torch.float64)])
        if self._experts.plan.world_size > 1:
            self._experts.peers.all_reduce(vector)
        return vector.tolist()


def _squared_norm(tensors: list[Tensor], device: torch.device) -> Tensor:
    """Sum of squares in float64, as a scalar tensor."""
    if not tensors:
        return torch.zeros((), dtype=torch.float64, device=device)
    norms = torch._foreach_norm(tensors, 2, dtype=torch.float64)
    return torch.stack(norms).square().sum()
