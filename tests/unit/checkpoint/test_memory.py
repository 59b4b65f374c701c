"""Snapshots, as far as they need no engine."""

from __future__ import annotations

import weakref

import pytest
import torch

from megatron_lazarus.checkpoint.memory import Snapshot


def test_a_copy_lets_go_of_its_sources_itself() -> None:
    """Else the update does, which training waits for."""
    source, target = torch.randn(1000), torch.empty(1000)
    expected, kept = source.clone(), weakref.ref(source)
    snapshot = Snapshot([(source, target)])
    del source
    snapshot.wait()
    assert kept() is None
    assert torch.equal(target, expected)


def test_a_copy_that_fails_is_reported_to_the_writer_and_not_to_training() -> None:
    snapshot = Snapshot([(torch.randn(3), torch.empty(4))])
    snapshot.ordered()
    with pytest.raises(RuntimeError, match="size"):
        snapshot.wait()
