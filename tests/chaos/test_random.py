"""A slice of the storm, with fixed seeds so that a failure can be run again; ``tests.chaos.storm`` runs more."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.chaos.nursery import Nursery
from tests.chaos.storm import Storm, events_in

SEEDS, ENOUGH_S = (25, 1, 17, 2, 3, 4), 40.0
"""The first one kills the coordinator's host."""


def test_random_faults(nursery: Nursery, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events, runs = 0, 0
    end = time.monotonic() + ENOUGH_S
    for seed in SEEDS:
        if time.monotonic() > end:
            break
        storm = Storm(seed)
        with capsys.disabled():
            print(f"\nseed {seed}: {'; '.join(storm.log)}")
        folder = tmp_path / str(seed)
        folder.mkdir()
        events += events_in(storm.run(nursery, folder))
        runs += 1
    assert runs >= 2
    assert events >= 3 * runs
