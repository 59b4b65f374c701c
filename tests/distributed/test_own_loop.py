"""Loops that a script drives itself, side by side with stock DeepSpeed: all it may do within a step or ask of it."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.distributed import reference
from tests.distributed.pool import Pools
from tests.distributed.runs import make_optimizer, make_scheduler
from tests.distributed.tiny import HIDDEN, Expert, TinyMoE, batch, expert_values, lazarus_moe

WORLD, EXPERTS, STEPS, BATCH = 2, 4, 4, 2
AUX = 0.05
OPTIONS = {"k": 2, "drop_tokens": False, "top2_2nd_expert_sampling": False}
SCHEDULE = {"type": "WarmupLR", "params": {"warmup_min_lr": 0.001, "warmup_max_lr": 0.01, "warmup_num_steps": 3}}


def stock_model(rank: int) -> nn.Module:
    from deepspeed.moe.layer import MoE

    local = EXPERTS // WORLD

    def make(layer: int) -> nn.Module:
        moe = MoE(HIDDEN, Expert(), EXPERTS, ep_size=WORLD, **OPTIONS)
        for index, expert in enumerate(moe.deepspeed_moe.experts.deepspeed_experts):
            expert.load_state_dict(expert_values(layer, rank * local + index, torch.float32))
        return moe

    return TinyMoE(make, aux_coefficient=AUX)


def build(under: str, rank: int, accumulation: int, folder: str, by_json: bool) -> Any:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.0,
        "steps_per_print": 2,
        "csv_monitor": {"enabled": True, "output_path": folder, "job_name": under},
    }
    model = stock_model(rank) if under == "stock" else TinyMoE(lazarus_moe(EXPERTS, **OPTIONS), aux_coefficient=AUX)
    given: dict[str, Any] = {"model": model}
    if by_json:
        config["optimizer"] = {"type": "AdamW", "params": {"lr": 0.01, "eps": 1e-3, "torch_adam": True}}
        config["scheduler"] = SCHEDULE
        given["model_parameters"] = model.parameters()
    else:
        given["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        given["lr_scheduler"] = torch.optim.lr_scheduler.StepLR(given["optimizer"], 2, 0.5)
    if under == "stock":
        import deepspeed

        return deepspeed.initialize(config=config, **given)
    import megatron_lazarus

    return megatron_lazarus.initialize(config={**config, "lazarus": {}}, **given)


class Script:
    """Trains, and notes all that the engine tells it."""

    def __init__(self, engine: Any, rank: int) -> None:
        self.engine, self.rank = engine, rank
        self.seen: list[tuple[str, float]] = []
        self._count = 0

    def note(self, name: str, value: Any) -> None:
        self.seen.append((name, float(value)))

    def forward(self) -> Any:
        values = batch(self._count, self.rank)
        self._count += 1
        loss, metrics = self.engine(values["tokens"], values["labels"])
        self.note("loss", loss)
        self.note("aux", metrics["aux"])
        return loss

    def ask(self) -> None:
        engine = self.engine
        self.note("boundary", engine.is_gradient_accumulation_boundary())
        self.note("accumulation", engine.gradient_accumulation_steps())
        self.note("steps", engine.global_steps)
        self.note("samples", engine.global_samples)
        self.note("micro steps", engine.micro_steps)
        self.note("rate", engine.get_lr()[0])
        self.note("applied", engine.was_step_applied())

    def plain(self) -> None:
        loss = self.forward()
        self.ask()
        self.note("returned", self.engine.backward(loss))
        self.ask()
        self.engine.step()
        self.ask()

    def with_evaluation(self) -> None:
        self.plain()
        self.engine.eval()
        with torch.no_grad():
            self.forward()
        self.engine.train()

    def evaluates_before_backward(self) -> None:
        loss = self.forward()
        self.engine.eval()
        with torch.no_grad():
            self.forward()
        self.engine.train()
        self.engine.backward(loss)
        self.engine.step()

    def no_sync(self) -> None:
        with self.engine.no_sync():
            for _ in range(2):
                self.note("returned", self.engine.backward(self.forward()))
        self.engine.backward(self.forward())
        self.engine.step()
        self.ask()

    def own_boundary(self) -> None:
        self.engine.set_gradient_accumulation_boundary(False)
        self.engine.backward(self.forward())
        self.engine.set_gradient_accumulation_boundary(True)
        self.ask()
        # Stock DeepSpeed 0.19.8 divides after all if the loss is the model's very output.
        self.engine.backward(self.forward() * 1.0, scale_wrt_gas=False)
        self.engine.step()
        self.ask()

    def begins_anew(self) -> None:
        """As some do who see a bad loss."""
        self.engine.backward(self.forward())
        self.engine.zero_grad()
        if self.engine.gradient_accumulation_steps() > 1:
            self.engine.step()
        self.engine.backward(self.forward())
        self.engine.step()

    def two_forwards(self) -> None:
        first, second = self.forward(), self.forward()
        self.engine.backward(second)
        self.engine.step()
        self.engine.backward(first)
        self.engine.step()

    def criterion_outside(self) -> None:
        self.engine.backward(self.forward() * 2.0)
        self.engine.step()


def run(rank: int, world: int, under: str, how: str, accumulation: int, folder: str, by_json: bool) -> Any:
    engine, optimizer, _, scheduler = build(under, rank, accumulation, folder, by_json)
    assert scheduler is engine.lr_scheduler
    assert optimizer is engine.optimizer
    script = Script(engine, rank)
    while engine.global_steps < STEPS:
        getattr(script, how)()
    if under != "stock":
        norm = engine.get_global_grad_norm()
        assert norm is not None
        assert math.isfinite(norm)
    # The first rank writes them.
    files = sorted(Path(folder).glob(f"{under}/*.csv")) if rank == 0 else []
    return script.seen, {file.name: file.read_text() for file in files}


CASES = [
    ("plain", 1, True),
    ("plain", 3, False),
    ("with_evaluation", 2, True),
    ("evaluates_before_backward", 2, False),
    ("no_sync", 1, False),
    ("own_boundary", 2, True),
    ("begins_anew", 2, False),
    ("two_forwards", 2, False),
    ("criterion_outside", 2, True),
]


@pytest.mark.parametrize(("how", "accumulation", "by_json"), CASES)
def test_same_as_stock(workers: Pools, tmp_path: Path, how: str, accumulation: int, by_json: bool) -> None:
    arguments = (how, accumulation, str(tmp_path), by_json)
    theirs, ours = (workers(WORLD)(run, under, *arguments, timeout=120) for under in ("stock", "lazarus"))
    for (seen, files), (expected, stock_files) in zip(ours, theirs, strict=True):
        assert [name for name, _ in seen] == [name for name, _ in expected]
        for (name, value), (_, right) in zip(seen, expected, strict=True):
            assert value == pytest.approx(right, rel=1e-5, abs=1e-6), name
        assert files.keys() == stock_files.keys()
        for name, text in stock_files.items():
            assert files[name] == text, name


# -- training data, without a coordinator ------------------------------------------------------------------------------


class Dataset:
    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < 30:
            raise IndexError(index)
        return {name: values[0] for name, values in batch(index, 0, samples=1).items()}


def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


def engine_with_data(total: int) -> tuple[Any, Any]:
    """(engine, loader) for steps of ``total`` micro-batches."""
    import megatron_lazarus

    torch.set_default_dtype(torch.float64)
    model = TinyMoE(lazarus_moe(EXPERTS, **OPTIONS), aux_coefficient=AUX)
    optimizer = make_optimizer("adam")(model)
    engine, _, loader, _ = megatron_lazarus.initialize(
        model=model,
        optimizer=optimizer,
        lr_scheduler=make_scheduler(optimizer),
        training_data=Dataset(),
        collate_fn=collate,
        config={
            "train_batch_size": total * BATCH,
            "train_micro_batch_size_per_gpu": BATCH,
            "gradient_clipping": 0.5,
            "lazarus": {},
        },
    )
    return engine, loader


def data_run(rank: int, world: int, how: str, total: int) -> tuple[list[float], list[float], int, list[float]]:
    """Losses and norms by step, batches of this rank, and tokens of a step that reached experts, by layer."""
    engine, loader = engine_with_data(total)
    losses, norms, batches = [], [], 0
    steps: Callable[[Any], Any] = {"loop": one_by_one, "no_sync": all_but_the_last, "function": in_functions}[how]
    for _epoch in range(2):
        for _ in steps((engine, loader)):
            batches += 1
            if engine.global_steps > len(losses):
                result = engine.protocol.result()
                losses.append(result.loss)
                norms.append(result.grad_norm)
    return losses, norms, batches, [float(load.sum()) for load in engine.experts.loads]


def one_by_one(given: Any) -> Any:
    engine, loader = given
    for values in loader:
        engine.backward(engine(**values)[0])
        engine.step()
        yield


def all_but_the_last(given: Any) -> Any:
    engine, loader = given
    for values in loader:
        last = engine.is_gradient_accumulation_boundary()
        with contextlib.nullcontext() if last else engine.no_sync():
            engine.backward(engine(**values)[0])
        if last:
            engine.step()
        yield


def in_functions(given: Any) -> Any:
    engine, loader = given
    for values in loader:
        loss = engine.run_step(lambda values=values: engine.backward(engine(**values)[0] * 1.0))
        assert loss.dim() == 0
        yield


@pytest.mark.parametrize("how", ["loop", "no_sync", "function"])
def test_training_data_gives_the_same_at_any_world_size(workers: Pools, how: str) -> None:
    total, count = 5, len(Dataset())
    order = [i for epoch in range(2) for i in torch.randperm(count, generator=_seeded(epoch)).tolist()]
    size = total * BATCH
    windows = [order[start : start + size] for start in range(0, len(order), size)]
    steps = [[collate([Dataset()[i] for i in window[m::total]]) for m in range(total)] for window in windows]
    truth = reference.train_on(EXPERTS, 2, steps, 0.5, make_optimizer("adam"), make_scheduler, AUX)
    for world in (1, 2, 3):
        for losses, norms, batches, tokens in workers(world)(data_run, how, total, timeout=120):
            assert losses == pytest.approx([loss for loss, _, _ in truth], rel=1e-9)
            assert norms == pytest.approx([norm for _, norm, _ in truth], rel=1e-9)
            assert batches == len(windows) * -(-total // world)
            # Twelve tokens a sample, two experts each; those of batches that count for nothing reach none.
            assert tokens == pytest.approx([size * 12 * 2] * 2)
    assert Counter(order) == Counter(list(range(count)) * 2)


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def resumed_run(rank: int, world: int, folder: str, steps: int) -> list[tuple[int, float]]:
    """Go on from the checkpoint, if any, up to so many steps, and save: (step, loss)."""
    engine, loader = engine_with_data(5)
    _, client_state = engine.load_checkpoint(folder)
    assert client_state is None or (client_state["mine"] == 1 and not any("lazarus" in key for key in client_state))
    losses: list[tuple[int, float]] = []
    before = engine.global_steps
    while engine.global_steps < steps:
        for values in loader:
            engine.backward(engine(**values)[0])
            engine.step()
            if engine.global_steps > before:
                before = engine.global_steps
                losses.append((before - 1, engine.protocol.result().loss))
            if engine.global_steps == steps:
                break
    assert engine.save_checkpoint(folder, client_state={"mine": 1})
    engine.finish()
    return losses


def test_a_run_goes_on_in_the_middle_of_an_epoch_on_other_ranks(workers: Pools, tmp_path: Path) -> None:
    total, count = 5, len(Dataset())
    order = [i for epoch in range(3) for i in torch.randperm(count, generator=_seeded(epoch)).tolist()]
    size = total * BATCH
    windows = [order[start : start + size] for start in range(0, len(order), size)]
    steps = [[collate([Dataset()[i] for i in window[m::total]]) for m in range(total)] for window in windows]
    truth = reference.train_on(EXPERTS, 2, steps, 0.5, make_optimizer("adam"), make_scheduler, AUX)
    seen: list[tuple[int, float]] = []
    for world, until in ((2, 2), (3, 4), (1, 7)):
        seen += workers(world)(resumed_run, str(tmp_path), until, timeout=120)[0]
    assert [step for step, _ in seen] == list(range(7))
    assert [loss for _, loss in seen] == pytest.approx([loss for loss, _, _ in truth[:7]], rel=1e-9)
