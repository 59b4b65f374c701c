from __future__ import annotations

import pytest

from megatron_lazarus.reporting import goodput
from megatron_lazarus.reporting.goodput import Goodput


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(goodput.time, "monotonic", lambda: now[0])
    return now


def test_from_the_first_steps_begin_to_the_last_steps_end(clock: list[float]) -> None:
    counted = Goodput()
    assert (counted.share, counted.wall_s) == (1.0, 0.0)
    counted.step(2.0)
    clock[0] += 6.0
    counted.step(2.0)
    clock[0] += 50.0
    assert counted.to_json() == {"productive_s": 4.0, "wall_s": 8.0}
    assert counted.share == 0.5


def test_a_newcomer_goes_on_counting(clock: list[float]) -> None:
    old, new = Goodput(), Goodput()
    old.step(2.0)
    clock[0] += 5.0
    counted = old.since_begin()
    clock[0] = 17.0
    new.adopt(counted)
    clock[0] += 3.0
    new.step(1.0)
    assert new.to_json() == {"productive_s": 3.0, "wall_s": 10.0}


def test_a_newcomer_before_the_first_step(clock: list[float]) -> None:
    new = Goodput()
    new.adopt(Goodput().since_begin())
    new.step(1.0)
    assert new.to_json() == {"productive_s": 1.0, "wall_s": 1.0}
