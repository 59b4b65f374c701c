"""Training runs of ``TinyMoE`` on an engine, described by a picklable ``Run``; the tests compare their histories."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from megatron_lazarus.planning.plan import Placement, Plan
from tests.distributed.tiny import TinyMoE, batch, lazarus_moe


@dataclass(frozen=True)
class Run:
    """One run. ``slots``: explicit placement of every layer; ``lengths``: sequence length of micro-batch m (cyclic)."""

    micro_batches: int = 12
    steps: int = 10
    experts: int = 6
    k: int = 2
    dtype: torch.dtype = torch.float64
    dropout: float = 0.0
    clip: float = 0.5
    aux: float = 0.05
    optimizer: str = "adam"
    attach_aux: bool = False
    slots: tuple[tuple[int, ...], ...] | None = None
    lengths: tuple[int, ...] = (12,)
    one_expert_takes_all: bool = False
    moe_options: dict[str, Any] = field(default_factory=dict)
    section: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    backend: str = "all_to_all"
    recompute: str | None = None


@dataclass(frozen=True)
class History:
    """What one rank saw: losses and norms of each step, and the (step, micro-batch) whose loss it differentiated."""

    losses: list[float]
    norms: list[float]
    skipped: list[bool]
    samples: list[tuple[int, int]]
    dense_digest: float


def make_optimizer(kind: str) -> Callable[[nn.Module], torch.optim.Optimizer]:
    if kind == "sgd":
        return lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-6)


def make_scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LinearLR(optimizer, 0.3, 1.0, total_iters=20)


def build(rank: int, world: int, run: Run) -> tuple[Any, Ledger]:
    """An engine for ``run`` and the ledger of the samples it trains on."""
    import megatron_lazarus

    torch.set_default_dtype(run.dtype)
    options = {"k": run.k, "drop_tokens": False, "top2_2nd_expert_sampling": False, **run.moe_options}
    if run.attach_aux:
        options["aux_loss_coefficient"] = run.aux
    model = TinyMoE(lazarus_moe(run.experts, **options), run.dropout, 0.0 if run.attach_aux else run.aux)
    if run.one_expert_takes_all:
        with torch.no_grad():
            for moe in model.moe:
                moe.gate.wg.weight.zero_()
    if run.recompute:
        _recompute(model, run.recompute)
    ledger = Ledger(model)
    config = {
        "train_batch_size": run.micro_batches * 2,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": run.clip,
        "lazarus": run.section,
        **run.extra,
    }
    plan = None
    if run.slots is not None:
        placement = Placement(run.experts, run.slots)
        plan = Plan((placement,) * len(model.moe), (0,) * world)
    optimizer = make_optimizer(run.optimizer)(model)
    engine, *_ = megatron_lazarus.initialize(
        model=model, optimizer=optimizer, lr_scheduler=make_scheduler(optimizer), config=config, plan=plan, seed=7
    )
    engine.experts._exchange._backend = run.backend
    return engine, ledger


def _recompute(model: TinyMoE, how: str) -> None:
    from torch.utils.checkpoint import checkpoint

    for moe in model.moe:
        forward = moe.forward

        def wrapped(hidden: Tensor, forward: Any = forward) -> Any:
            if how == "reentrant":
                return checkpoint(forward, hidden, use_reentrant=True)
            return checkpoint(forward, hidden, use_reentrant=False, early_stop=False)

        moe.forward = wrapped


class Ledger:
    """Counts a micro-batch as trained on when its loss receives a gradient that is not zero."""

    def __init__(self, model: nn.Module) -> None:
        self.samples: list[tuple[int, int]] = []
        self._current = (-1, -1)
        model.register_forward_hook(self._watch)

    def data(self, run: Run) -> Callable[[int, int], dict[str, Tensor]]:
        def micro_batch(step: int, number: int) -> dict[str, Tensor]:
            self._current = (step, number)
            return batch(step, number, length=run.lengths[number % len(run.lengths)])

        return micro_batch

    def _watch(self, module: nn.Module, inputs: Any, output: Any) -> None:
        loss, current = output[0], self._current

        def count(gradient: Tensor) -> None:
            if float(gradient) != 0.0:
                self.samples.append(current)

        if loss.requires_grad:
            loss.register_hook(count)


def train(engine: Any, ledger: Ledger, run: Run, steps: int) -> History:
    """``steps`` engine-driven steps."""
    results = [engine.train_batch(ledger.data(run)) for _ in range(steps)]
    digest = sum(float(p.detach().double().abs().sum()) for p in engine.module.parameters())
    return History(
        losses=[result.loss for result in results],
        norms=[result.grad_norm for result in results],
        skipped=[result.skipped for result in results],
        samples=list(ledger.samples),
        dense_digest=digest,
    )


def run_all(rank: int, world: int, *runs: Run) -> list[History]:
    """Train every run from scratch; checks on the way that replicas are bitwise equal."""
    histories = []
    for run in runs:
        engine, ledger = build(rank, world, run)
        histories.append(train(engine, ledger, run, run.steps))
        assert_replicas_equal(engine)
    return histories


def assert_replicas_equal(engine: Any) -> None:
    """Every replica of every expert has the same bytes on all ranks."""
    import hashlib

    import torch.distributed as dist

    mine = [
        (layer, expert, hashlib.sha256(buffer.rows[slot].numpy().tobytes()).hexdigest())
        for layer, buffer in enumerate(engine.experts.buffers)
        for slot, expert in enumerate(buffer.experts)
    ]
    everyone: list[Any] = [None] * engine.world_size
    dist.all_gather_object(everyone, mine)
    digests: dict[tuple[int, int], set[str]] = {}
    for layer, expert, digest in (entry for part in everyone for entry in part):
        digests.setdefault((layer, expert), set()).add(digest)
    assert all(len(found) == 1 for found in digests.values()), "replicas differ"


def relative(left: list[float], right: list[float]) -> float:
    """Largest relative difference of two histories."""
    assert len(left) == len(right)
    return max(abs(a - b) / max(abs(b), 1e-12) for a, b in zip(left, right, strict=True))
