"""The order of samples, and what the loader hands out, against what their documentation says."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler

from megatron_lazarus.config import BatchSizes, ConfigError
from megatron_lazarus.planning.batches import micro_batches, shares_around
from megatron_lazarus.training_data import SampleOrder, TrainingData, training_loader


def loaders(
    count: int, sizes: BatchSizes, world: int, drop_last: bool = False, collate: Any = list
) -> list[TrainingData]:
    """One per rank."""
    made = []
    for rank in range(world):
        loader = TrainingData(range(count), SampleOrder(count, sizes, 0, drop_last), collate)
        loader.place = lambda rank=rank: (rank, world)
        made.append(loader)
    return made


def train(loader: TrainingData, batches: list[list[int]]) -> None:
    """As an engine does with batches that a script has just fetched."""
    for batch in batches:
        counted = loader.number is not None
        loader.backwarded()
        loader.seen = [*getattr(loader, "seen", []), *(batch if counted else [])]
        if loader.round == loader.rounds:
            loader.committed()


@given(st.integers(1, 60), st.integers(1, 12))
def test_shares_of_nothing_begun_are_those_of_a_step(total: int, world: int) -> None:
    rows = shares_around(total, [()] * world)
    assert [[number for number in row if number is not None] for row in rows] == list(
        map(list, micro_batches(total, world))
    )
    assert {len(row) for row in rows} == {-(-total // world)}


@given(st.data())
def test_every_micro_batch_once_around_what_is_begun(data: st.DataObject) -> None:
    total, world = data.draw(st.integers(1, 30)), data.draw(st.integers(1, 6))
    numbers = data.draw(st.permutations(range(total)))[: data.draw(st.integers(0, total))]
    begun: list[list[int | None]] = [[] for _ in range(world)]
    for number in [*numbers, *[None] * data.draw(st.integers(0, 4))]:
        begun[data.draw(st.integers(0, world - 1))].append(number)
    least = data.draw(st.integers(1, 5))
    rows = shares_around(total, begun, least)
    assert sorted(number for row in rows for number in row if number is not None) == list(range(total))
    (rounds,) = {len(row) for row in rows}
    cells = total + sum(row.count(None) for row in begun)
    assert rounds == max(least, max(map(len, begun)), -(-cells // world))
    assert all(list(row[: len(first)]) == first for row, first in zip(rows, begun, strict=True))


@pytest.mark.parametrize("begun", [[[1], [1]], [[7]], [[-1]]])
def test_begun_twice_or_unknown_is_refused(begun: list[list[int | None]]) -> None:
    with pytest.raises(ValueError, match="each may be once"):
        shares_around(4, begun)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(1, 3), st.integers(1, 5), st.integers(1, 5), st.booleans())
def test_epochs_follow_one_another_at_any_world_size(
    count: int, micro_batch_size: int, total: int, world: int, drop_last: bool
) -> None:
    sizes = BatchSizes(micro_batch_size, total)
    if drop_last and count < sizes.global_batch_size:
        with pytest.raises(ConfigError, match="less than one global batch"):
            loaders(count, sizes, world, drop_last)
        return
    ranks = loaders(count, sizes, world, drop_last)
    length = count - count % sizes.global_batch_size if drop_last else count
    row: list[int] = []
    for epoch in range(3):
        lengths = set()
        for loader in ranks:
            lengths.add(len(loader))
            seen = 0
            for batch in loader:
                train(loader, [batch])
                seen += 1
            lengths.add(seen)
        assert len(lengths) == 1, f"len() and batches of epoch {epoch}: {lengths}"
        order = torch.randperm(count, generator=torch.Generator().manual_seed(epoch)).tolist()
        row += order[:length]
        steps = len(row) // sizes.global_batch_size
        assert all(loader.step == steps for loader in ranks)
        seen_all = Counter(sample for loader in ranks for sample in getattr(loader, "seen", []))
        assert seen_all == Counter(row[: steps * sizes.global_batch_size])


def test_one_micro_batch_a_rank_is_what_the_stock_sampler_gives() -> None:
    count, world, size = 48, 4, 3
    ranks = loaders(count, BatchSizes(size, world), world)
    for rank, loader in enumerate(ranks):
        sampler = DistributedSampler(range(count), num_replicas=world, rank=rank)
        stock = DataLoader(range(count), size, sampler=sampler, collate_fn=list)
        mine = []
        for batch in loader:
            train(loader, [batch])
            mine.append(batch)
        assert mine == list(stock)
        assert len(loader) == len(stock)


def test_broken_off_it_goes_on_and_a_dropped_step_comes_again() -> None:
    (loader,) = loaders(12, BatchSizes(2, 2), 1)
    first = [batch for _, batch in zip(range(2), loader, strict=False)]
    loader.backwarded()
    loader.backwarded()
    loader.dropped()
    again = [batch for _, batch in zip(range(2), loader, strict=False)]
    assert again == first
    train(loader, again)
    rest = []
    for batch in loader:
        train(loader, [batch])
        rest.append(batch)
    assert len(rest) == 4
    assert Counter(loader.seen) == Counter(range(12))


def test_position_goes_into_checkpoints_and_must_fit() -> None:
    (loader,) = loaders(20, BatchSizes(2, 2), 1)
    for _, batch in zip(range(14), (b for _ in range(2) for b in loader), strict=False):
        train(loader, [batch])
    (other,) = loaders(20, BatchSizes(2, 2), 1)
    other.restore(loader.state())
    assert other.step == 7
    assert len(list_of(other)) == 2 * 3, "the rest of the second epoch"
    (wrong,) = loaders(24, BatchSizes(2, 2), 1)
    with pytest.raises(ConfigError, match="epoch_length 20, here it is 24"):
        wrong.restore(loader.state())


def test_a_newcomer_iterates_over_what_is_left() -> None:
    (loader,) = loaders(20, BatchSizes(2, 2), 1)
    loader.join(7)
    assert [len(list_of(loader)) for _ in range(4)] == [0, 6, 10, 10]


def list_of(loader: TrainingData) -> list[list[int]]:
    batches = []
    for batch in loader:
        train(loader, [batch])
        batches.append(batch)
    return batches


def test_only_map_style_datasets() -> None:
    with pytest.raises(ConfigError, match="training_data is a generator; it must be a map-style dataset"):
        training_loader((number for number in range(3)), BatchSizes(1, 1), {}, 0, None)
    loader = training_loader([torch.ones(2)] * 5, BatchSizes(2, 1), {"dataloader_drop_last": True}, 0, None)
    assert [batch.shape for batch in list_of(loader)] == [(2, 2), (2, 2)]
