"""The loss curve depends on neither placement nor world size, and equals that of a plain reference."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter

import pytest
import torch

from tests.distributed import reference
from tests.distributed.pool import Pools
from tests.distributed.runs import History, Run, make_optimizer, make_scheduler, relative, run_all
from tests.distributed.tiny import batch

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_equals_reference_without_parallelism(workers: Pools, k: int, optimizer: str) -> None:
    run = Run(k=k, optimizer=optimizer, micro_batches=6)
    history = workers(4)(run_all, run, timeout=120)[0][0]
    truth = reference.train(
        run.experts,
        k,
        run.micro_batches,
        run.steps,
        run.clip,
        batch,
        make_optimizer(optimizer),
        make_scheduler,
        run.aux,
    )
    assert max(norm for _, norm in truth) > run.clip, "clipping must be active"
    assert relative(history.losses, [loss for loss, _ in truth]) < 1e-9
    assert relative(history.norms, [norm for _, norm in truth]) < 1e-9


def _random_placements(count: int, experts: int, world: int) -> list[tuple[tuple[int, ...], ...]]:
    """Random slots: 1..world replicas, several replicas of one expert on a rank, ranks with none, uneven ranks."""
    source = random.Random(5)
    placements = []
    while len(placements) < count:
        rows = [[source.randrange(experts) for _ in range(source.randint(0, 5))] for _ in range(world)]
        if {expert for row in rows for expert in row} == set(range(experts)):
            placements.append(tuple(map(tuple, rows)))
    return placements


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_placement_does_not_matter(workers: Pools, dtype: torch.dtype) -> None:
    # Five experts on four ranks: no placement is even.
    base = Run(experts=5, micro_batches=6, dtype=dtype, lengths=(12, 5, 9))
    runs = [dataclasses.replace(base, slots=slots) for slots in _random_placements(20, base.experts, 4)]
    histories = workers(4)(run_all, *runs, timeout=300)[0]
    assert max(histories[0].norms) > base.clip, "clipping must be active"
    for history in histories[1:]:
        assert relative(history.losses, histories[0].losses) < TOLERANCE[dtype]
        assert relative(history.norms, histories[0].norms) < TOLERANCE[dtype]


def test_extreme_routing(workers: Pools) -> None:
    """One expert takes every token and the others none; a rank holds only idle experts; a rank has no tokens."""
    base = Run(k=1, one_expert_takes_all=True, micro_batches=3, optimizer="sgd")
    slots = (((0, 1, 2), (3, 4), (5, 3), (4,)), ((1, 2), (0,), (0, 0, 5), (3, 4)), ((0, 1, 2, 3, 4, 5),) * 4)
    histories = workers(4)(run_all, *(dataclasses.replace(base, slots=row) for row in slots), timeout=120)[0]
    alone = workers(1)(run_all, base, timeout=120)[0][0]
    for history in histories:
        assert relative(history.losses, alone.losses) < 1e-9
        assert relative(history.norms, alone.norms) < 1e-9


def test_point_to_point_exchange_gives_the_same(workers: Pools) -> None:
    slots = ((0, 1, 2), (1, 2, 3), (3, 4, 5, 0), (5, 5, 1))
    run = Run(slots=slots, micro_batches=4)
    one, other = workers(4)(run_all, run, dataclasses.replace(run, backend="point_to_point"), timeout=120)[0]
    assert one.losses == other.losses
    assert one.norms == other.norms


def test_world_size_does_not_matter(workers: Pools) -> None:
    # Twelve micro-batches on five ranks are shares of 3, 3, 2, 2, 2; dropout is drawn alike everywhere.
    exact = Run(micro_batches=12, steps=30, dropout=0.1)
    runs = [exact, dataclasses.replace(exact, dtype=torch.float32)]
    histories = {world: workers(world)(run_all, *runs, timeout=300) for world in (1, 2, 3, 4, 5)}
    expected = Counter((step, number) for step in range(exact.steps) for number in range(exact.micro_batches))
    for index, tolerance in enumerate((1e-9, 1e-4)):
        alone = histories[1][0][index].losses
        assert alone[-1] < alone[0] - 0.5, "the model must learn"
        for ranks in histories.values():
            assert relative(ranks[0][index].losses, alone) < tolerance
            assert all(rank[index].losses == ranks[0][index].losses for rank in ranks), "ranks report different losses"
            assert Counter(sample for rank in ranks for sample in rank[index].samples) == expected


def test_fewer_micro_batches_than_ranks(workers: Pools) -> None:
    run = Run(micro_batches=3, dropout=0.1, attach_aux=True)
    alone, four = workers(1)(run_all, run, timeout=60), workers(4)(run_all, run, timeout=60)
    assert relative(four[0][0].losses, alone[0][0].losses) < 1e-9
    assert relative(four[0][0].norms, alone[0][0].norms) < 1e-9
    assert Counter(s for rank in four for s in rank[0].samples) == Counter(alone[0][0].samples)


@pytest.mark.parametrize("recompute", ["reentrant", "not_reentrant"])
def test_activation_recomputation_changes_nothing(workers: Pools, recompute: str) -> None:
    base = Run(attach_aux=True, dropout=0.1, micro_batches=6, moe_options={"noisy_gate_policy": "Jitter"})
    chunked = {"experts": {"max_tokens_per_expert_chunk": 3}}
    runs = [
        base,
        dataclasses.replace(base, recompute=recompute),
        dataclasses.replace(base, recompute=recompute, section=chunked),
    ]
    plain, again, in_chunks = workers(4)(run_all, *runs, timeout=120)[0]
    assert plain.losses == again.losses
    assert plain.norms == again.norms
    assert relative(in_chunks.norms, plain.norms) < 1e-9


def test_attached_aux_loss_equals_added_aux_loss(workers: Pools) -> None:
    base = Run(micro_batches=5)
    added, attached = workers(3)(run_all, base, dataclasses.replace(base, attach_aux=True), timeout=60)[0]
    # The attached loss trains the same; only the reported loss leaves it out.
    assert relative(attached.norms, added.norms) < 1e-9


def test_sigmoid_router_with_bias_at_any_world_size(workers: Pools) -> None:
    options = {"router": "sigmoid", "expert_bias_update_rate": 0.01, "z_loss_coefficient": 1e-3}
    run = Run(micro_batches=6, moe_options=options, attach_aux=True)
    histories: list[History] = [workers(world)(run_all, run, timeout=60)[0][0] for world in (1, 2, 4)]
    for history in histories[1:]:
        assert relative(history.losses, histories[0].losses) < 1e-9


@pytest.mark.parametrize("k", [1, 2, 3])
def test_capacity_does_not_depend_on_world_size(workers: Pools, k: int) -> None:
    run = Run(k=k, micro_batches=6, moe_options={"drop_tokens": True, "min_capacity": 2})
    histories = [workers(world)(run_all, run, timeout=60)[0][0] for world in (1, 4)]
    assert relative(histories[1].losses, histories[0].losses) < 1e-9
