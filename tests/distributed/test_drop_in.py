"""A stock script beside itself under lazarus: real processes, the same draws, losses and counts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.distributed import stock_script
from tests.distributed.pool import Pools

WORLD, STEPS = 2, 20


@contextmanager
def overridden(under: str) -> Iterator[dict[str, Any]]:
    """The process as the launcher would have prepared it; yields what the JSON has of lazarus."""
    from megatron_lazarus.patches import undo_all

    from megatron_lazarus.script import prepare

    section = {"lazarus": {}} if under == "lazarus" else {}
    prepare(section.get("lazarus"))
    try:
        yield section
    finally:
        undo_all()


def run(rank: int, world: int, under: str, optimizer: str, extra: dict[str, Any], options: dict[str, Any]) -> Any:
    with overridden(under) as section:
        config = {
            "train_micro_batch_size_per_gpu": 16,
            # Stock's norm depends on the layout of experts.
            "gradient_clipping": 0.0,
            **extra,
            **section,
        }
        engine = stock_script.build(optimizer, config, **options)
        return type(engine).__name__, stock_script.train(engine, rank, STEPS)


ADAM = {"optimizer": {"type": "AdamW", "params": {"lr": 0.003, "eps": 1e-3, "torch_adam": True}}}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "defaults": ("split", {}, {}),
    "top-2": ("split", {"gradient_accumulation_steps": 2}, {"k": 2}),
    "jitter": ("json", ADAM, {"noisy_gate_policy": "Jitter", "min_capacity": 2}),
    "rsample": ("sgd", {}, {"noisy_gate_policy": "RSample", "drop_tokens": False}),
    "residual": ("whole", {}, {"use_residual": True, "use_rts": False}),
    "top-3": ("chunks", {}, {"k": 3, "capacity_factor": 0.7}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("ep_size", [1, 2])
def test_the_same_losses(workers: Pools, case: str, ep_size: int) -> None:
    optimizer, extra, options = CASES[case]
    options = {"num_experts": 4, "ep_size": ep_size, **options}
    stock = workers(WORLD)(run, "stock", optimizer, extra, options)
    ours = workers(WORLD)(run, "lazarus", optimizer, extra, options)
    assert [name for name, _ in stock] == ["DeepSpeedEngine"] * WORLD
    assert [name for name, _ in ours] == ["LazarusEngine"] * WORLD
    for (_, mine), (_, theirs) in zip(ours, stock, strict=True):
        assert mine == pytest.approx(theirs, abs=1e-5)
