"""Save at one world size and placement, load at another, go on as if nothing had happened."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.pool import Pools, WorkersFailed
from tests.distributed.runs import Run, assert_replicas_equal, build, relative, train

STRAIGHT = 20


def straight(rank: int, world: int, *runs: Run) -> list[list[float]]:
    histories = []
    for run in runs:
        engine, ledger = build(rank, world, run)
        histories.append(train(engine, ledger, run, STRAIGHT).losses)
    return histories


def first_half(rank: int, world: int, directory: str, *runs: Run) -> None:
    for index, run in enumerate(runs):
        engine, ledger = build(rank, world, run)
        train(engine, ledger, run, STRAIGHT // 2)
        engine.save_checkpoint(os.path.join(directory, str(index)), client_state={"consumed": 10 * run.micro_batches})


def second_half(rank: int, world: int, directory: str, *runs: Run) -> list[Any]:
    results = []
    for index, run in enumerate(runs):
        engine, ledger = build(rank, world, run)
        path, client_state = engine.load_checkpoint(os.path.join(directory, str(index)))
        assert path is not None
        assert client_state["consumed"] == 10 * run.micro_batches
        assert engine.global_steps == STRAIGHT // 2
        assert_replicas_equal(engine)
        history = train(engine, ledger, run, STRAIGHT // 2)
        assert_replicas_equal(engine)
        results.append((history.losses, history.samples, engine.get_lr()))
    return results


def test_resume_at_other_world_sizes(workers: Pools, tmp_path: Path) -> None:
    # Dropout makes the next random draw part of the state.
    exact = Run(micro_batches=6, dropout=0.1, optimizer="adam")
    runs = [
        exact,
        dataclasses.replace(exact, dtype=torch.float32),
        dataclasses.replace(exact, optimizer="sgd", attach_aux=True),
        dataclasses.replace(
            exact,
            attach_aux=True,
            moe_options={"router": "sigmoid", "expert_bias_update_rate": 0.01},
            section={"experts": {"min_replicas": 1}},
        ),
    ]
    tolerances = [1e-9, 1e-4, 1e-9, 1e-9]
    expected = workers(4)(straight, *runs, timeout=180)[0]
    workers(4)(first_half, str(tmp_path), *runs, timeout=180)
    for world in (3, 2, 1):
        ranks = workers(world)(second_half, str(tmp_path), *runs, timeout=180)
        for index, tolerance in enumerate(tolerances):
            losses, _, _ = ranks[0][index]
            assert relative(losses, expected[index][STRAIGHT // 2 :]) < tolerance
            samples = sorted(sample for rank in ranks for sample in rank[index][1])
            assert samples == [(s, m) for s in range(STRAIGHT // 2, STRAIGHT) for m in range(exact.micro_batches)]


def load_only(rank: int, world: int, directory: str, run: Run) -> None:
    engine, _ = build(rank, world, run)
    before = [p.detach().clone() for p in engine.module.parameters()]
    try:
        engine.load_checkpoint(directory)
    finally:
        for parameter, old in zip(engine.module.parameters(), before, strict=True):
            assert torch.equal(parameter, old), "a refused checkpoint must change nothing"


def save_only(rank: int, world: int, directory: str, run: Run) -> None:
    engine, ledger = build(rank, world, run)
    train(engine, ledger, run, 1)
    engine.save_checkpoint(directory)


def _flip_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("experts/layer_1_expert_3.safetensors", _flip_byte),
        ("experts/layer_0_expert_0.safetensors", Path.unlink),
        ("mp_rank_00_model_states.pt", lambda path: path.write_bytes(path.read_bytes()[:-1])),
        ("manifest.json", _flip_byte),
        ("manifest.json", Path.unlink),
    ],
)
def test_damaged_checkpoint_is_refused_by_name(
    workers: Pools, tmp_path: Path, name: str, damage: Callable[[Path], object]
) -> None:
    run = Run(micro_batches=2)
    workers(2)(save_only, str(tmp_path), run, timeout=60)
    damage(tmp_path / "global_step1" / name)
    with pytest.raises(WorkersFailed, match=rf"CheckpointError.*{Path(name).name}"):
        workers(2)(load_only, str(tmp_path), run, timeout=60)


def test_checkpoint_of_another_model_is_refused(workers: Pools, tmp_path: Path) -> None:
    run = Run(micro_batches=2)
    workers(2)(save_only, str(tmp_path), run, timeout=60)
    with pytest.raises(
        WorkersFailed, match=r"another model or optimizer.*num_experts is 6 in the checkpoint, 4 in the model"
    ):
        workers(2)(load_only, str(tmp_path), dataclasses.replace(run, experts=4), timeout=60)
    with pytest.raises(WorkersFailed, match=r"another model or optimizer.*exp_avg.*momentum_buffer"):
        workers(2)(load_only, str(tmp_path), dataclasses.replace(run, optimizer="sgd"), timeout=60)


def unsafe_state(rank: int, world: int, directory: str, run: Run) -> list[str]:
    engine, _ = build(rank, world, run)
    messages = []
    for state in ({"ok": 1, "worker": {"inner": [object()]}}, {"function": print}):
        try:
            engine.save_checkpoint(directory, client_state=state)
        except Exception as error:
            messages.append(f"{type(error).__name__}: {error}")
    return [*messages, *os.listdir(directory)]


def test_objects_that_need_pickle_are_refused_at_save(workers: Pools, tmp_path: Path) -> None:
    first, second = workers(2)(unsafe_state, str(tmp_path), Run(micro_batches=2), timeout=60)[0]
    assert "CheckpointError: client_state['worker']['inner'][0] is a builtins.object" in first
    assert "client_state['function']" in second


def test_layout_and_publication(workers: Pools, tmp_path: Path) -> None:
    workers(2)(save_only, str(tmp_path), Run(micro_batches=2), timeout=60)
    assert (tmp_path / "latest").read_text() == "global_step1"
    tag = tmp_path / "global_step1"
    manifest = json.loads((tag / "manifest.json").read_text())["manifest"]
    on_disk = {str(path.relative_to(tag)) for path in tag.rglob("*") if path.is_file()} - {"manifest.json"}
    records = {part["name"] for entry in manifest["experts"] for part in entry["parts"]}
    assert {entry["name"] for entry in manifest["files"]} | records == on_disk
    assert sum(name.startswith("experts/") for name in on_disk) == 2 * 6


class Bomb:
    """Creates a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (self.path, "w")


def test_pickle_in_a_dense_file_is_not_executed(workers: Pools, tmp_path: Path) -> None:
    """Even where the manifest was made to agree with the malicious file."""
    import hashlib

    run = Run(micro_batches=2)
    workers(2)(save_only, str(tmp_path), run, timeout=60)
    tag, mark = tmp_path / "global_step1", tmp_path / "executed"
    torch.save({"module": Bomb(str(mark))}, tag / "mp_rank_00_model_states.pt")
    path = tag / "manifest.json"
    document = json.loads(path.read_text())
    data = (tag / "mp_rank_00_model_states.pt").read_bytes()
    for entry in document["manifest"]["files"]:
        if entry["name"] == "mp_rank_00_model_states.pt":
            entry.update(bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    body = json.dumps(document["manifest"], sort_keys=True).encode()
    document["sha256"] = hashlib.sha256(body).hexdigest()
    path.write_text(json.dumps(document, indent=1))
    with pytest.raises(WorkersFailed, match=r"weights_only|Unsupported|UnpicklingError"):
        workers(2)(load_only, str(tmp_path), run, timeout=60)
    assert not mark.exists()
