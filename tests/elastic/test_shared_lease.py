"""One process at a time holds the shared lease, wherever any of them stops."""

from __future__ import annotations

import random
from typing import Any

from megatron_lazarus.elastic.shared_lease import SharedLease

LIMIT = 4.0


class Storage:
    """Several processes at one lease, each of which may stop between any two of its calls."""

    def __init__(self, folder: Any, seed: int) -> None:
        self.random, self.now = random.Random(seed), 0.0
        self.views = [SharedLease(folder, "token", LIMIT, lambda: self.now) for _ in range(3)]
        self.terms = [0, 0, 0]
        self.taken = 0

    def step(self) -> None:
        index = self.random.randrange(len(self.views))
        view = self.views[index]
        chance = self.random.random()
        if chance < 0.4:
            self.now += 0.25
        elif self.terms[index]:
            if not view.renew(self.terms[index]):
                self.terms[index] = 0
        elif view.is_vacant() and view.take(term := view.newest() + 1):
            self.terms[index] = term
            self.taken += 1
        if chance > 0.97:
            # Asleep for long: what it believed then is what it goes on with.
            self.now += 2 * LIMIT
        assert sum(view.holds(self.now) for view in self.views) <= 1


def test_one_process_holds_the_shared_lease(tmp_path: Any) -> None:
    taken = 0
    for seed in range(20):
        storage = Storage(tmp_path / str(seed), seed)
        for _ in range(300):
            storage.step()
        taken += storage.taken
    assert taken > 40


def test_a_released_lease_leaves_nothing(tmp_path: Any) -> None:
    now = [0.0]
    lease, other = (SharedLease(tmp_path, "token", LIMIT, lambda: now[0]) for _ in range(2))
    assert lease.is_vacant()
    assert lease.take(1)
    assert not other.take(1)
    assert not other.is_vacant()
    now[0] += LIMIT - 1
    assert lease.renew(1)
    now[0] += LIMIT + 1
    assert not lease.renew(1)
    other.is_vacant()
    now[0] += 1.6 * LIMIT
    assert other.is_vacant()
    assert other.take(2)
    lease.release()
    assert other.newest() == 2
    other.release()
    assert list(tmp_path.iterdir()) == []
