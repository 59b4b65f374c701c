"""Shares of a global batch for any world size."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_lazarus.planning.batches import micro_batches


@given(st.integers(1, 500), st.integers(1, 80))
def test_every_micro_batch_once_in_order_and_shares_within_one(total, world_size):
    shares = micro_batches(total, world_size)
    assert [number for share in shares for number in share] == list(range(total))
    lengths = [len(share) for share in shares]
    assert len(lengths) == world_size
    assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize(("total", "world_size", "says"), [(0, 2, "total is 0"), (3, 0, "world_size is 0")])
def test_bad_input_is_named_with_the_legal_range(total, world_size, says):
    with pytest.raises(ValueError, match=says + ".*at least 1|" + says):
        micro_batches(total, world_size)
