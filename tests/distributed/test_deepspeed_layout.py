"""Side by side with stock ``deepspeed.moe``: its checkpoints go on here, ours go on there, as if nothing happened."""

from __future__ import annotations

import os
import shutil
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megatron_lazarus.checkpoint.deepspeed_layout import export_checkpoint, import_checkpoint
from megatron_lazarus.checkpoint.files import CheckpointError
from megatron_lazarus.checkpoint.optimizer_state import rule_of_patterns
from tests.distributed.pool import Pools, WorkersFailed
from tests.distributed.tiny import HIDDEN, Expert, TinyMoE, batch, expert_values, lazarus_moe

EXPERTS, MICRO_BATCHES, FIRST, THEN = 4, 4, 3, 4
TAG = f"global_step{FIRST}"
OPTIONS: dict[str, Any] = {"k": 1, "capacity_factor": 1.0, "min_capacity": 24, "use_rts": False}


@dataclass(frozen=True)
class Run:
    """One training run on either side. ``split``: the script splits its parameter groups as DeepSpeed's tutorial."""

    optimizer: str = "adamw"
    split: bool = False
    decay_groups: bool = False
    bf16: bool = False
    residual: bool = False
    tied: bool = False
    heads_apart: bool = False
    schedule: str = "linear"


def _optimizer(model: nn.Module, run: Run, split: bool) -> torch.optim.Optimizer:
    groups: list[dict[str, Any]] = [{"params": list(model.parameters()), "name": "all"}]
    if run.decay_groups:
        groups = [
            {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1, "name": "decayed"},
            {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0, "lr": 0.01, "name": "not"},
        ]
    if run.heads_apart:
        head = {id(p) for p in model.head.parameters()}
        groups = [
            {"params": [p for p in model.parameters() if id(p) in head], "lr": 0.01},
            {"params": [p for p in model.parameters() if id(p) not in head]},
        ]
    if split:
        from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

        groups = split_params_into_different_moe_groups_for_optimizer(groups)
    if run.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=0.05, momentum=0.9)
    return torch.optim.AdamW(groups, lr=0.003, eps=1e-3)


def _schedule(optimizer: torch.optim.Optimizer, run: Run) -> torch.optim.lr_scheduler.LRScheduler:
    if run.schedule == "lambda":
        # Unlike the linear one it works from the state's own learning rates of every group.
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    return torch.optim.lr_scheduler.LinearLR(optimizer, 0.3, 1.0, total_iters=20)


def _model(make: Any, run: Run) -> nn.Module:
    model = TinyMoE(make, aux_coefficient=0.05)
    if run.tied:
        model.head.weight = model.embed.weight
    return model


def _stock_engine(rank: int, world: int, ep_size: int, run: Run, extra: dict[str, Any] | None = None) -> Any:
    import deepspeed
    from deepspeed.moe.layer import MoE

    local = EXPERTS // ep_size

    def make(layer: int) -> nn.Module:
        moe = MoE(HIDDEN, Expert(), EXPERTS, ep_size=ep_size, use_residual=run.residual, **OPTIONS)
        for index, expert in enumerate(moe.deepspeed_moe.experts.deepspeed_experts):
            expert.load_state_dict(expert_values(layer, (rank % ep_size) * local + index, torch.float32))
        return moe

    model = _model(make, run)
    optimizer = _optimizer(model, run, run.split)
    config = {**_config(run), "gradient_accumulation_steps": MICRO_BATCHES // world, **(extra or {})}
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=_schedule(optimizer, run), config=config
    )
    return engine


def _config(run: Run) -> dict[str, Any]:
    # Stock's norm depends on the layout of experts, so neither side clips.
    return {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.0, "bf16": {"enabled": run.bf16}}


def _lazarus_engine(run: Run) -> Any:
    import megatron_lazarus

    def make(layer: int) -> nn.Module:
        options = {**OPTIONS, "use_residual": run.residual}
        return lazarus_moe(EXPERTS, residual_mlp=Expert() if run.residual else None, **options)(layer)

    model = _model(make, run)
    optimizer = _optimizer(model, run, split=False)
    config = {**_config(run), "train_batch_size": 2 * MICRO_BATCHES, "lazarus": {}}
    engine, *_ = megatron_lazarus.initialize(
        model=model, optimizer=optimizer, lr_scheduler=_schedule(optimizer, run), config=config
    )
    return engine


def _stock_losses(rank: int, world: int, engine: Any, steps: int) -> list[float]:
    """This rank's mean loss of each step."""
    losses = []
    for _ in range(steps):
        step, share = engine.global_steps, []
        for number in range(rank, MICRO_BATCHES, world):
            loss, _ = engine(**batch(step, number))
            engine.backward(loss)
            engine.step()
            share.append(float(loss.detach()))
        losses.append(sum(share) / len(share))
    return losses


def stock_first(rank: int, world: int, directory: str, ep_size: int, run: Run) -> list[float]:
    """Train, save, go on."""
    engine = _stock_engine(rank, world, ep_size, run)
    _stock_losses(rank, world, engine, FIRST)
    engine.save_checkpoint(directory, client_state={"iteration": FIRST})
    return _stock_losses(rank, world, engine, THEN)


def stock_then(rank: int, world: int, directory: str, ep_size: int, run: Run) -> list[float]:
    """Load, go on."""
    engine = _stock_engine(rank, world, ep_size, run)
    path, client_state = engine.load_checkpoint(directory)
    assert path is not None
    assert client_state["iteration"] == FIRST
    assert engine.global_steps == FIRST
    return _stock_losses(rank, world, engine, THEN)


def lazarus_first(rank: int, world: int, directory: str, run: Run) -> list[float]:
    engine = _lazarus_engine(run)
    for _ in range(FIRST):
        engine.train_batch(batch)
    engine.save_checkpoint(directory, client_state={"iteration": FIRST})
    return [engine.train_batch(batch).loss for _ in range(THEN)]


def lazarus_then(rank: int, world: int, directory: str, run: Run) -> list[float]:
    engine = _lazarus_engine(run)
    path, client_state = engine.load_checkpoint(directory)
    assert path is not None
    assert client_state["iteration"] == FIRST
    assert engine.global_steps == FIRST
    return [engine.train_batch(batch).loss for _ in range(THEN)]


def _mean(by_rank: list[list[float]]) -> list[float]:
    return [sum(losses) / len(losses) for losses in zip(*by_rank, strict=True)]


RUNS = [
    Run(),
    Run(split=True),
    Run(split=True, decay_groups=True, residual=True, tied=True, schedule="lambda"),
    Run(optimizer="sgd", decay_groups=True),
    Run(split=True, bf16=True),
]


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_a_stock_run_goes_on_here(workers: Pools, tmp_path: Path, run: Run) -> None:
    stock, ours = tmp_path / "stock", tmp_path / "ours"
    expected = _mean(workers(4)(stock_first, str(stock), 2, run, timeout=120))
    import_checkpoint(str(stock), str(ours))
    losses = workers(2)(lazarus_then, str(ours), run, timeout=120)[0]
    assert losses == pytest.approx(expected, rel=1e-2 if run.bf16 else 1e-5)
    assert losses[0] != pytest.approx(losses[-1], rel=1e-2), "a run that stands still proves nothing"


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_a_run_of_ours_goes_on_under_stock(workers: Pools, tmp_path: Path, run: Run) -> None:
    ours, stock = tmp_path / "ours", tmp_path / "stock"
    expected = workers(2)(lazarus_first, str(ours), run, timeout=120)[0]
    export_checkpoint(str(ours), str(stock), ep_size=2, world_size=4, split=run.split)
    losses = _mean(workers(4)(stock_then, str(stock), 2, run, timeout=120))
    assert losses == pytest.approx(expected, rel=1e-2 if run.bf16 else 1e-5)


def _assert_same(left: Any, right: Any, where: str) -> None:
    """The same structure and the same bits."""
    assert type(left) is type(right) or {type(left), type(right)} <= {dict, OrderedDict}, where
    if isinstance(left, torch.Tensor):
        assert left.dtype == right.dtype, where
        assert torch.equal(left, right), where
    elif isinstance(left, dict):
        assert list(left) == list(right) or set(left) == set(right), where
        for key in left:
            _assert_same(left[key], right[key], f"{where}[{key!r}]")
    elif isinstance(left, (list, tuple)):
        assert len(left) == len(right), where
        for index, (one, other) in enumerate(zip(left, right, strict=True)):
            _assert_same(one, other, f"{where}[{index}]")
    else:
        assert left == right, where


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_there_and_back_changes_no_bit(workers: Pools, tmp_path: Path, run: Run) -> None:
    """A stock checkpoint, imported and exported for the same ep_size, is file by file what it was."""
    stock, ours, again = tmp_path / "stock", tmp_path / "ours", tmp_path / "again"
    workers(4)(stock_first, str(stock), 2, run, timeout=120)
    import_checkpoint(str(stock), str(ours))
    export_checkpoint(str(ours), str(again), ep_size=2, world_size=4, split=run.split)
    names = sorted(os.listdir(stock / TAG))
    assert sorted(os.listdir(again / TAG)) == names
    assert (again / "latest").read_text() == TAG
    for name in names:
        before, after = (torch.load(root / TAG / name, weights_only=True) for root in (stock, again))
        _assert_same(before, after, name)


@pytest.mark.parametrize("ep_size", [1, 4])
def test_other_ep_sizes(workers: Pools, tmp_path: Path, ep_size: int) -> None:
    """Optimizer state moves too, which stock DeepSpeed itself cannot do."""
    run = Run(split=True)
    stock, ours, other = tmp_path / "stock", tmp_path / "ours", tmp_path / "other"
    expected = _mean(workers(4)(stock_first, str(stock), 2, run, timeout=120))
    import_checkpoint(str(stock), str(ours))
    export_checkpoint(str(ours), str(other), ep_size=ep_size, world_size=4)
    losses = _mean(workers(4)(stock_then, str(other), ep_size, run, timeout=120))
    assert losses == pytest.approx(expected, rel=1e-5)


def lazarus_weights(rank: int, world: int, directory: str, run: Run) -> float:
    engine = _lazarus_engine(run)
    engine.load_checkpoint(directory, load_module_only=True)
    return engine.eval_batch(lambda step, number: batch(FIRST, number), MICRO_BATCHES)["loss"]


def stock_zero(rank: int, world: int, directory: str, run: Run) -> float:
    engine = _stock_engine(rank, world, 2, run, {"zero_optimization": {"stage": 1}})
    _stock_losses(rank, world, engine, FIRST)
    engine.save_checkpoint(directory)
    engine.eval()
    losses = [float(engine(**batch(FIRST, number))[0]) for number in range(rank, MICRO_BATCHES, world)]
    return sum(losses) / len(losses)


def test_of_zero_only_weights_come_along(workers: Pools, tmp_path: Path) -> None:
    run = Run(split=True)
    stock, ours = tmp_path / "stock", tmp_path / "ours"
    expected = workers(4)(stock_zero, str(stock), run, timeout=120)
    assert import_checkpoint(str(stock), str(ours)).ep_size == 0
    assert workers(2)(lazarus_weights, str(ours), run, timeout=120)[0] == pytest.approx(
        sum(expected) / len(expected), rel=1e-5
    )
    with pytest.raises(WorkersFailed, match="another model or optimizer"):
        workers(2)(lazarus_then, str(ours), run, timeout=120)


def test_what_cannot_be_converted_is_refused_by_name(workers: Pools, tmp_path: Path) -> None:
    stock, ours = tmp_path / "stock", tmp_path / "ours"
    workers(4)(stock_first, str(stock), 2, Run(), timeout=120)
    shutil.copytree(stock, tmp_path / "copy")
    import_checkpoint(str(stock), str(ours))

    with pytest.raises(CheckpointError, match="exists; it is not written over"):
        import_checkpoint(str(stock), str(ours))
    with pytest.raises(CheckpointError, match="ep_size is 3; it must divide"):
        export_checkpoint(str(ours), str(tmp_path / "out"), ep_size=3)
    with pytest.raises(CheckpointError, match="world size is 6; it must be a multiple of ep_size 4"):
        export_checkpoint(str(ours), str(tmp_path / "out"), ep_size=4, world_size=6)
    with pytest.raises(CheckpointError, match="no file 'latest'"):
        import_checkpoint(str(tmp_path), str(tmp_path / "out"))
    with pytest.raises(CheckpointError, match="counts experts"):
        import_checkpoint(str(_edited(tmp_path / "copy", num_experts=[EXPERTS])), str(tmp_path / "out"))
    with pytest.raises(CheckpointError, match="AutoEP"):
        import_checkpoint(str(_edited(tmp_path / "copy", ds_autoep_layers=[{}])), str(tmp_path / "out"))
    damaged = stock / TAG / "layer_1_expert_3_mp_rank_00_model_states.pt"
    damaged.write_bytes(damaged.read_bytes()[:-200])
    with pytest.raises(CheckpointError, match=rf"{damaged.name} cannot be read safely"):
        import_checkpoint(str(stock), str(tmp_path / "out"))
    assert os.listdir(tmp_path / "out") == [], "what fails leaves nothing behind"


def _edited(save_dir: Path, **changes: Any) -> Path:
    path = save_dir / TAG / "mp_rank_00_model_states.pt"
    torch.save({**torch.load(path, weights_only=True), **changes}, path)
    return save_dir


def test_unusual_groups_need_patterns(workers: Pools, tmp_path: Path) -> None:
    """Groups that follow from no usual rule are refused; told what they hold, the run goes on."""
    run = Run(heads_apart=True)
    stock, ours = tmp_path / "stock", tmp_path / "ours"
    expected = _mean(workers(4)(stock_first, str(stock), 2, run, timeout=120))
    with pytest.raises(CheckpointError, match="give one pattern of parameter names for each group"):
        import_checkpoint(str(stock), str(ours))
    import_checkpoint(str(stock), str(ours), rules=[rule_of_patterns(["^head", ""])])
    losses = workers(2)(lazarus_then, str(ours), run, timeout=120)[0]
    assert losses == pytest.approx(expected, rel=1e-5)


class Bomb:
    """Creates a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (self.path, "w")


def test_a_pickle_in_a_stock_checkpoint_is_not_executed(workers: Pools, tmp_path: Path) -> None:
    stock, mark = tmp_path / "stock", tmp_path / "executed"
    workers(4)(stock_first, str(stock), 2, Run(), timeout=120)
    for name in sorted(os.listdir(stock / TAG)):
        whole = (stock / TAG / name).read_bytes()
        torch.save({**torch.load(stock / TAG / name, weights_only=True), "bomb": Bomb(str(mark))}, stock / TAG / name)
        with pytest.raises(CheckpointError, match=f"{name} cannot be read safely"):
            import_checkpoint(str(stock), str(tmp_path / "ours"))
        (stock / TAG / name).write_bytes(whole)
    assert not mark.exists()


def _tensor_bytes(value: Any) -> int:
    """Of all tensors in a nested state but the step counts."""
    if isinstance(value, torch.Tensor):
        return value.nbytes if value.numel() > 1 else 0
    if isinstance(value, dict):
        return sum(map(_tensor_bytes, value.values()))
    return sum(map(_tensor_bytes, value)) if isinstance(value, (list, tuple)) else 0


def test_what_the_busiest_rank_of_stock_writes(workers: Pools, tmp_path: Path) -> None:
    """The formula that scripts/benchmarks/checkpoint_sizes.py compares with: bf16 weights, fp32 master and moments."""
    workers(4)(stock_first, str(tmp_path), 4, Run(split=True, bf16=True), timeout=120)
    names = ["mp_rank_00_model_states.pt", "expp_rank_0_mp_rank_00_optim_states.pt"]
    experts = [f"layer_{layer}_expert_0_mp_rank_00_model_states.pt" for layer in range(2)]
    content = {name: torch.load(tmp_path / TAG / name, weights_only=True) for name in [*names, *experts]}
    dense = sum(tensor.numel() for tensor in content[names[0]]["module"].values())
    own_experts = sum(tensor.numel() for name in experts for tensor in content[name].values())
    # Rank 0 writes its optimizer, of the dense part and of its experts, into both files.
    expected = 2 * (dense + own_experts) + 2 * 12 * (dense + own_experts)
    assert sum(map(_tensor_bytes, content.values())) == expected
