"""What holds for every test: one thread for torch, and DeepSpeed on the CPU, set before either is imported."""

from __future__ import annotations

import os

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--extensive", action="store_true", help="also run what takes long: more faults, more repetitions")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave extensive tests out (deselected, not counted as passed) unless they are asked for."""
    if config.getoption("--extensive"):
        return
    left_out = [item for item in items if item.get_closest_marker("extensive")]
    if left_out:
        items[:] = [item for item in items if not item.get_closest_marker("extensive")]
        config.hook.pytest_deselected(items=left_out)
