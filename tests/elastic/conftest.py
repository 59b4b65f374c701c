"""Marks the tests that start processes."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path == Path(__file__).parent / "test_jobs.py":
            item.add_marker(pytest.mark.distributed)
