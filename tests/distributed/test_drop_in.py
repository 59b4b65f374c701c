"""A stock script beside itself under lazarus: real processes, the same draws, losses and counts."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version

from megatron_lazarus.checkpoint.files import CheckpointError
from megatron_lazarus.cli import main
from tests.distributed import stock_script
from tests.distributed.pool import Pools, WorkersFailed

WORLD, STEPS = 2, 20


@contextmanager
def overridden(under: str, experts: dict[str, Any] | None = None) -> Iterator[dict[str, Any]]:
    """The process as the launcher would have prepared it; yields what the JSON has of lazarus."""
    from megatron_lazarus.patches import undo_all

    from megatron_lazarus.script import prepare

    section = {"lazarus": {"experts": experts or {}}} if under == "lazarus" else {}
    prepare(section.get("lazarus"))
    try:
        yield section
    finally:
        undo_all()


def _config(extra: dict[str, Any], section: dict[str, Any]) -> dict[str, Any]:
    # Stock's norm depends on the layout of experts.
    config = {"train_micro_batch_size_per_gpu": 16, "gradient_clipping": 0.0, **extra, **section}
    # DeepSpeed 0.18.9 takes what it has read out of the JSON.
    return copy.deepcopy(config)


def run(rank: int, world: int, under: str, optimizer: str, extra: dict[str, Any], options: dict[str, Any]) -> Any:
    with overridden(under) as section:
        engine = stock_script.build(rank, optimizer, _config(extra, section), **options)
        return type(engine).__name__, stock_script.train(engine, rank, STEPS)


ADAM = {"optimizer": {"type": "AdamW", "params": {"lr": 0.003, "eps": 1e-3, "torch_adam": True}}}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "defaults": ("split", {}, {}),
    "top-2": ("split", {"gradient_accumulation_steps": 2}, {"k": 2}),
    "jitter": ("json", ADAM, {"noisy_gate_policy": "Jitter", "min_capacity": 2}),
    "rsample": ("sgd", {}, {"noisy_gate_policy": "RSample", "drop_tokens": False}),
    "residual": ("whole", {}, {"use_residual": True, "use_rts": False}),
    "top-3": ("chunks", {}, {"k": 3, "drop_tokens": False}),
    "callable": ("callable", {}, {"use_rts": False}),
}
# Before, DeepSpeed asked the wrong file for the optimizer of a float32 run, and got none or another rank's.
STOCK_RESUMES = Version(version("deepspeed")) >= Version("0.19")
if STOCK_RESUMES:
    # Before, of three or more choices it drops those of the lowest logits, but takes no choice for a logit of zero.
    CASES["top-3, dropping"] = ("split", {}, {"k": 3, "capacity_factor": 0.7})


@pytest.mark.parametrize(
    ("case", "ep_size"), [*((case, 2) for case in CASES), ("defaults", 1), ("residual", 1), ("callable", 1)]
)
def test_the_same_losses(workers: Pools, case: str, ep_size: int) -> None:
    optimizer, extra, options = CASES[case]
    options = {"num_experts": 4, "ep_size": ep_size, **options}
    stock = workers(WORLD)(run, "stock", optimizer, extra, options)
    ours = workers(WORLD)(run, "lazarus", optimizer, extra, options)
    assert [name for name, _ in stock] == ["DeepSpeedEngine"] * WORLD
    assert [name for name, _ in ours] == ["LazarusEngine"] * WORLD
    for (_, mine), (_, theirs) in zip(ours, stock, strict=True):
        assert mine == pytest.approx(theirs, abs=1e-5)


# -- checkpoints ----------------------------------------------------------------------------------------------------

FIRST, THEN = 3, 4
# Draws would begin anew in a process that loads.
SAVED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "json, residual": ("json", ADAM, {"use_rts": False, "use_residual": True}),
    "split": ("split", {}, {"k": 2, "top2_2nd_expert_sampling": False}),
    # All experts for every token: the two round differently in bf16, which may change a close choice.
    "split into chunks, bf16": ("chunks", {"bf16": {"enabled": True}}, {"k": 4, "drop_tokens": False}),
    "whole, sgd": ("sgd", {}, {"use_rts": False, "drop_tokens": False}),
    "one group": ("whole", {}, {"use_rts": False}),
}


def first(rank: int, world: int, under: str, folder: str, case: str, ep_size: int) -> tuple[list[float], Any]:
    """Train, save, look, go on."""
    optimizer, extra, options = SAVED[case]
    with overridden(under) as section:
        engine = stock_script.build(rank, optimizer, _config(extra, section), num_experts=4, ep_size=ep_size, **options)
        stock_script.train(engine, rank, FIRST)
        engine.save_checkpoint(folder, client_state={"epoch": 2})
        outputs = stock_script.outputs(engine, rank)
        return stock_script.train(engine, rank, THEN, FIRST), (outputs, stock_script.types(engine))


def then(
    rank: int, world: int, under: str, folder: str, case: str, ep_size: int, experts: dict[str, Any] | None = None
) -> tuple[list[float], Any]:
    """Load, look, go on."""
    optimizer, extra, options = SAVED[case]
    with overridden(under, experts) as section:
        engine = stock_script.build(rank, optimizer, _config(extra, section), num_experts=4, ep_size=ep_size, **options)
        before = stock_script.outputs(engine, rank)
        path, client_state = engine.load_checkpoint(folder)
        assert path is not None
        assert client_state["epoch"] == 2
        assert [name for name in client_state if "lazarus" in name] == []
        assert engine.global_steps == FIRST
        outputs = stock_script.outputs(engine, rank)
        assert not torch.allclose(before, outputs, atol=1e-3), "a load that changes nothing proves nothing"
        return stock_script.train(engine, rank, THEN, FIRST), (outputs, stock_script.types(engine))


def _same(
    mine: list[tuple[list[float], Any]], theirs: list[tuple[list[float], Any]], case: str, go_on: bool = True
) -> None:
    tolerance = 3e-2 if "bf16" in case else 1e-5
    for (losses, (outputs, types)), (expected, (expected_outputs, expected_types)) in zip(mine, theirs, strict=True):
        assert float((outputs - expected_outputs).abs().max()) <= tolerance
        assert types == expected_types
        assert losses[: None if go_on else 1] == pytest.approx(expected[: None if go_on else 1], abs=tolerance)


@pytest.mark.parametrize("case", SAVED)
def test_old_checkpoints_load(workers: Pools, tmp_path: Path, case: str) -> None:
    ep_size = 1 if case == "one group" else 2
    stock = workers(WORLD)(first, "stock", str(tmp_path), case, ep_size)
    _same(workers(WORLD)(then, "lazarus", str(tmp_path), case, ep_size), stock, case)


@pytest.mark.parametrize("case", SAVED)
def test_new_checkpoints_export_back(workers: Pools, tmp_path: Path, case: str) -> None:
    """As the command does it, which knows nothing of the script."""
    ep_size = 1 if case == "one group" else 2
    ours, stock = tmp_path / "ours", tmp_path / "stock"
    expected = workers(WORLD)(first, "lazarus", str(ours), case, ep_size)
    assert main(["checkpoint", "export", str(ours), str(stock), "--ep-size", str(ep_size), "--world-size", "2"]) == 0
    _same(workers(WORLD)(then, "stock", str(stock), case, ep_size), expected, case, STOCK_RESUMES or "bf16" in case)


@pytest.mark.parametrize("case", ["json, residual", "split", "whole, sgd"])
def test_imported_checkpoints_load_whatever_the_groups(workers: Pools, tmp_path: Path, case: str) -> None:
    stock, ours = tmp_path / "stock", tmp_path / "ours"
    expected = workers(WORLD)(first, "stock", str(stock), case, 2)
    assert main(["checkpoint", "import", str(stock), str(ours)]) == 0
    _same(workers(WORLD)(then, "lazarus", str(ours), case, 2), expected, case)


def test_old_checkpoints_of_another_ep_size(workers: Pools, tmp_path: Path) -> None:
    """Optimizer state too, which stock cannot load; it would begin the experts anew with what rank 0 has."""
    case = "json, residual"
    expected = workers(WORLD)(first, "stock", str(tmp_path), case, 2)
    _same(workers(WORLD)(then, "lazarus", str(tmp_path), case, 1), expected, case)


def zero(rank: int, world: int, under: str, folder: str, stage: int) -> Any:
    with overridden(under) as section:
        extra = {**ADAM, "zero_optimization": {"stage": stage}}
        config = _config(extra, section)
        engine = stock_script.build(rank, "json", config, num_experts=4, ep_size=2, use_rts=False)
        if under == "stock":
            stock_script.train(engine, rank, FIRST)
            engine.save_checkpoint(folder)
        else:
            with pytest.raises(CheckpointError, match="no optimizer state of ZeRO stage 0"):
                engine.load_checkpoint(folder)
            assert engine.global_steps == 0
            engine.load_checkpoint(folder, load_module_only=True)
        return stock_script.outputs(engine, rank)


def test_of_zero_the_weights_load(workers: Pools, tmp_path: Path) -> None:
    stock = workers(WORLD)(zero, "stock", str(tmp_path), 1)
    ours = workers(WORLD)(zero, "lazarus", str(tmp_path), 0)
    for mine, theirs in zip(ours, stock, strict=True):
        assert torch.allclose(mine, theirs, rtol=0, atol=1e-5)


def test_damage_is_found_before_anything_changes(workers: Pools, tmp_path: Path) -> None:
    workers(WORLD)(first, "stock", str(tmp_path), "split", 2)
    damaged = tmp_path / f"global_step{FIRST}" / "layer_1_expert_3_mp_rank_00_model_states.pt"
    damaged.write_bytes(damaged.read_bytes()[:-100])
    with pytest.raises(WorkersFailed, match=f"{damaged.name} cannot be read safely") as failed:
        workers(WORLD)(then, "lazarus", str(tmp_path), "split", 2, {"min_replicas": 1})
    # Also by the rank that has no need of that file.
    assert [failure.kind for failure in failed.value.failures] == ["CheckpointError"] * WORLD
