"""The worker pools, shared by all distributed tests of a session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed.pool import Pools


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.distributed)


@pytest.fixture(scope="session")
def workers() -> Iterator[Pools]:
    """``workers(4)(function, *arguments, timeout=60)``: see pool.py."""
    pools = Pools()
    yield pools
    pools.close()
