"""Fixtures for the model: a world of one, and small data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron_lazarus.models import preprocess


@pytest.fixture
def world_of_one() -> Iterator[None]:
    """A process group of this process alone, unless there is one."""
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def dataset(tmp_path: Path) -> Callable[..., str]:
    """A function: documents, name -> prefix of a byte-level data set."""

    def build(documents: list[str], name: str = "data") -> str:
        source = tmp_path / f"{name}.txt"
        source.write_text("\n---\n".join(documents), encoding="utf-8")
        command = ["--input", str(source), "--output-prefix", str(tmp_path / name), "--split-documents=---"]
        (prefix,) = preprocess.preprocess(preprocess.parse_arguments([*command, "--append-eod"]))
        return prefix

    return build
