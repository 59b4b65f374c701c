"""A slice of the storm, with fixed seeds so that a failure can be run again; ``tests.chaos.storm`` runs more."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.chaos.nursery import Nursery
from tests.chaos.storm import Storm, events_in

RUNS, ENOUGH_S = 6, 40.0


def test_random_faults(nursery: Nursery, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events, runs = 0, 0
    end = time.monotonic() + ENOUGH_S
    for seed in range(1, RUNS + 1):
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
