"""What is decided once for the whole model: gradient norm, clipping, and whether a step is committed."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from megatron_lazarus.guard import StepRefused
from tests.distributed.pool import Pools
from tests.distributed.runs import Run, assert_replicas_equal, build, train

# Three experts with 1, 2, 3 or 4 holders, in several arrangements.
SLOTS = (
    ((0,), (1,), (2,), ()),
    ((0, 1), (1, 2), (2, 0), (0,)),
    ((0, 0, 1), (2,), (1, 2), (2, 2)),
    ((0, 1, 2),) * 4,
)


def golden(rank: int, world: int, run: Run) -> tuple[float | None, list[float], dict[int, float]]:
    """Put known gradients in place of a backward's and let the engine finish the step.

    Dense: three tensors get a gradient of 3, 4 and 12 in one element, so their norm is 13. Each expert's replicas get
    parts of (expert + 1) * 2 in one element, whose sum over replicas is what counts. Returns the norm and how far
    those elements moved.
    """
    engine, _ = build(rank, world, run)
    for parameter in engine.protocol._dense:
        parameter.grad = torch.zeros_like(parameter)
    watched = [parameter.detach().view(-1)[0:1] for parameter in engine.protocol._dense[:3]]
    for parameter, value in zip(engine.protocol._dense, (3.0, 4.0, 12.0), strict=False):
        parameter.grad.view(-1)[0] = value
    for placement, buffer in zip(engine.plan.layers, engine.experts.buffers, strict=True):
        for expert, slot in buffer.first_slots().items():
            holders = placement.holders(expert)
            part = holders.index(rank) + 1
            total = len(holders) * (len(holders) + 1) / 2
            buffer.gradients[slot, 5] = 2.0 * (expert + 1) * part / total
    dense_before = [float(value) for value in watched]
    buffer = engine.experts.buffers[0]
    experts_before = buffer.field("parameter")[:, 5].clone()
    engine.protocol.finish({"loss": torch.zeros(())}, 1, "golden")
    moved = [old - float(new) for old, new in zip(dense_before, watched, strict=True)]
    expert_moved = (experts_before - buffer.field("parameter")[:, 5]).tolist()
    return engine.get_global_grad_norm(), moved, dict(zip(buffer.experts, expert_moved, strict=True))


@pytest.mark.parametrize("slots", SLOTS)
def test_golden_norm_and_clip(workers: Pools, slots: tuple[tuple[int, ...], ...]) -> None:
    clip, rate = 2.0, 0.1 * 0.3
    run = Run(experts=3, k=1, micro_batches=4, slots=slots, optimizer="sgd", clip=clip)
    # 13^2 dense, and 2^2 + 4^2 + 6^2 for the experts of each of two layers, each expert counted once.
    expected = math.sqrt(13.0**2 + 2 * (4.0 + 16.0 + 36.0))
    factor = clip / expected
    for norm, moved, experts in workers(4)(golden, run, timeout=60):
        assert norm == pytest.approx(expected, rel=1e-15)
        assert moved == pytest.approx([rate * factor * value for value in (3.0, 4.0, 12.0)], rel=1e-6)
        for expert, distance in experts.items():
            assert distance == pytest.approx(rate * factor * 2.0 * (expert + 1), rel=1e-6)


def poisoned(rank: int, world: int, run: Run, value: float) -> dict[str, Any]:
    engine, ledger = build(rank, world, run)
    train(engine, ledger, run, 2)
    records = [buffer.rows.clone() for buffer in engine.experts.buffers]
    dense = [p.detach().clone() for p in engine.module.parameters()]
    rate = engine.get_lr()[0]
    backward = engine._backward

    def poison(*arguments: Any, **options: Any) -> None:
        backward(*arguments, **options)
        if rank == 2:
            engine.experts.buffers[1].gradients[0, 3] = value

    engine._backward = poison
    result = engine.train_batch(ledger.data(run))
    unchanged = all(torch.equal(a, b.detach()) for a, b in zip(dense, engine.module.parameters(), strict=True))
    unchanged &= all(torch.equal(a, b.rows) for a, b in zip(records, engine.experts.buffers, strict=True))
    engine._backward = backward
    after = engine.train_batch(ledger.data(run))
    assert_replicas_equal(engine)
    return {
        "skipped": result.skipped,
        "unchanged": unchanged,
        "rate_kept": engine.lr_scheduler.last_epoch,
        "rate": rate,
        "count": engine.skipped_steps,
        "steps": engine.global_steps,
        "next_is_fine": not after.skipped and math.isfinite(after.loss),
    }


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nonfinite_gradient_of_one_expert_on_one_rank(workers: Pools, value: float) -> None:
    run = Run(micro_batches=4, slots=((0, 1, 2), (1, 2, 3), (3, 4, 5, 0), (5, 5, 1)))
    for seen in workers(4)(poisoned, run, value, timeout=60):
        assert seen["skipped"]
        assert seen["unchanged"]
        assert seen["count"] == 1
        assert seen["steps"] == 4
        assert seen["rate_kept"] == 3, "the schedule counts committed steps only"
        assert seen["next_is_fine"]


def stopped(rank: int, world: int, run: Run) -> str:
    engine, ledger = build(rank, world, run)
    train(engine, ledger, run, 1)
    backward = engine._backward

    def poison(*arguments: Any, **options: Any) -> None:
        backward(*arguments, **options)
        if rank == 0:
            engine.protocol._dense[0].grad[0] = math.nan

    engine._backward = poison
    try:
        train(engine, ledger, run, 5)
    except StepRefused as error:
        return f"{engine.global_steps}: {error}"
    return "not stopped"


@pytest.mark.parametrize(
    ("guard", "expected"),
    [
        ({"on_nonfinite": "stop"}, "1: step 1: loss"),
        ({"max_consecutive_skips": 2}, "3: step 3: loss"),
    ],
)
def test_policy_stops_every_rank_at_the_same_step(workers: Pools, guard: dict[str, Any], expected: str) -> None:
    messages = workers(2)(stopped, Run(micro_batches=2, section={"guard": guard}), timeout=60)
    assert all(message.startswith(expected) for message in messages), messages


def bf16(rank: int, world: int, run: Run) -> tuple[list[float], list[float]]:
    engine, ledger = build(rank, world, run)
    history = train(engine, ledger, run, 4)
    assert_replicas_equal(engine)
    buffer = engine.experts.buffers[0]
    assert buffer.layout.has_master
    assert buffer.field("parameter").dtype == torch.bfloat16
    assert torch.equal(buffer.field("parameter"), buffer.field("master").bfloat16())
    assert engine.module.embed.weight.dtype == torch.bfloat16
    return history.losses, history.norms


def test_bf16_trains_near_float32(workers: Pools) -> None:
    base = Run(micro_batches=4, dtype=torch.float32, steps=4)
    low = Run(micro_batches=4, dtype=torch.float32, steps=4, extra={"bf16": {"enabled": True}})
    exact = workers(2)(only_losses, base, timeout=60)[0]
    losses, norms = workers(2)(bf16, low, timeout=120)[0]
    assert all(math.isfinite(norm) and norm > 0 for norm in norms)
    assert losses[-1] < losses[0]
    assert losses == pytest.approx(exact, rel=0.05)


def only_losses(rank: int, world: int, run: Run) -> list[float]:
    engine, ledger = build(rank, world, run)
    return train(engine, ledger, run, run.steps).losses
