"""Partial saves while training goes on, loaded at other world sizes: every record is the one of its own last save."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_lazarus.checkpoint.manifest import Manifest, read_latest
from megatron_lazarus.checkpoint.restore import read_dense
from tests.distributed.pool import Pools
from tests.distributed.runs import Run, assert_replicas_equal, build, train

SAVES, STEPS_BETWEEN = 5, 2
Records = dict[tuple[int, int], dict[str, Any]]


def _records(engine: Any) -> Records:
    """Copies of all records that this rank has."""
    return {
        (layer, expert): {name: _array(tensor) for name, tensor in buffer.named_tensors(slot).items()}
        for layer, buffer in enumerate(engine.experts.buffers)
        for slot, expert in enumerate(buffer.experts)
    }


def _array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    # numpy has no bfloat16; every one of them is a float32.
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).detach().numpy().copy()


def _dense(engine: Any) -> list[np.ndarray[Any, Any]]:
    tensors = list(engine.module.parameters())
    optimizer = engine.optimizer.state_dict()
    tensors += [value for state in optimizer.get("state", {}).values() for value in state.values()]
    return [_array(tensor) for tensor in tensors if isinstance(tensor, torch.Tensor)]


def save_often(rank: int, world: int, directory: str, run: Run) -> dict[int, tuple[Records, Any]]:
    """What the state was at every save, by step."""
    engine, ledger = build(rank, world, run)
    seen = {}
    for _ in range(SAVES):
        train(engine, ledger, run, STEPS_BETWEEN)
        seen[engine.global_steps] = _records(engine), _dense(engine)
        assert engine.save_checkpoint(directory, client_state={"at": engine.global_steps})
    # The last one overlaps with these.
    train(engine, ledger, run, 1)
    engine.finish()
    assert engine._checkpoint.history.failures == 0
    return seen


def load(rank: int, world: int, directory: str, run: Run) -> tuple[Records, Any, Any, float]:
    engine, ledger = build(rank, world, run)
    path, client_state = engine.load_checkpoint(directory)
    assert path is not None
    assert_replicas_equal(engine)
    state = _records(engine), _dense(engine), client_state, engine.ledger.plt()
    train(engine, ledger, run, 1)
    assert_replicas_equal(engine)
    return state


def load_weights(rank: int, world: int, directory: str, run: Run) -> tuple[Records, int]:
    engine, _ = build(rank, world, run)
    engine.load_checkpoint(directory, load_module_only=True)
    return _records(engine), engine.global_steps


EXACT = Run(micro_batches=4, experts=6)
BF16 = dataclasses.replace(EXACT, dtype=torch.float32, extra={"bf16": {"enabled": True}})


@pytest.mark.parametrize(
    ("run", "content", "k", "selection"),
    [
        (EXACT, "all", 2, "sequential"),
        (dataclasses.replace(EXACT, dtype=torch.float32), "moments", 1, "load_aware"),
        (BF16, "moments", 2, "sequential"),
        (BF16, "all", 1, "load_aware"),
    ],
    ids=["float64-all", "float32-moments", "bf16-moments", "bf16-all"],
)
def test_partial_saves(workers: Pools, tmp_path: Path, run: Run, content: str, k: int, selection: str) -> None:
    section = {"persist_experts": k, "content": content, "selection": selection, "dynamic_k": False}
    run = dataclasses.replace(run, section={"checkpoint": section})
    folder = str(tmp_path / "saved")
    ranks = workers(4)(save_often, folder, run, timeout=120)
    truth: dict[int, tuple[Records, Any]] = {}
    for step, (_, dense) in ranks[0].items():
        truth[step] = {place: record for rank in ranks for place, record in rank[step][0].items()}, dense
    last = SAVES * STEPS_BETWEEN
    assert read_latest(folder) == f"global_step{last}"
    manifest = Manifest.read(os.path.join(folder, f"global_step{last}"))
    weights = "master" if run is not EXACT and "bf16" in run.extra else "parameter"
    taken: dict[tuple[int, int, str], int] = {}
    for entry in manifest.experts:
        for part in entry.parts:
            for field in part.fields:
                taken[entry.layer, entry.expert, field] = part.step
                if content == "moments" and field == weights:
                    assert part.step == last
    round_length = math.ceil(6 / k)
    for layer in range(2):
        for step in list(truth)[1:]:
            written = _written(folder, step, layer, "exp_avg")
            assert len(written) == k
        recent = {e for step in list(truth)[-round_length:] for e in _written(folder, step, layer, "exp_avg")}
        if round_length <= SAVES - 1 and selection == "sequential":
            assert recent == set(range(6)), "an expert is left out"
    for world in (3, 1):
        for records, dense, client_state, plt in workers(world)(load, folder, run, timeout=120):
            assert client_state["at"] == last
            assert plt > 0
            assert len(dense) == len(truth[last][1])
            assert all(np.array_equal(a, b) for a, b in zip(dense, truth[last][1], strict=True))
            for (layer, expert), record in records.items():
                for name, value in record.items():
                    field, _, rest = name.partition("/")
                    step = taken[layer, expert, field]
                    expected = truth[step][0][layer, expert][name]
                    if field == "parameter":
                        # The weights are those of the master copy, wherever the file of the parameters comes from.
                        step = taken[layer, expert, weights]
                        expected = truth[step][0][layer, expert][f"{weights}/{rest}"]
                        if weights == "master":
                            expected = torch.from_numpy(expected).bfloat16().float().numpy()
                    assert np.array_equal(value, expected), f"layer {layer} expert {expert} {name}"


def test_weights_alone(workers: Pools, tmp_path: Path) -> None:
    run = dataclasses.replace(BF16, section={"checkpoint": {"persist_experts": 1, "content": "moments"}})
    ranks = workers(4)(save_often, str(tmp_path), run, timeout=120)
    last = SAVES * STEPS_BETWEEN
    truth = {place: record for rank in ranks for place, record in rank[last][0].items()}
    for records, steps in workers(3)(load_weights, str(tmp_path), run, timeout=120):
        assert steps == 0
        for place, record in records.items():
            for name, value in record.items():
                if name.startswith(("parameter", "master")):
                    assert np.array_equal(value, truth[place][name])
                else:
                    assert not value.any()


def collectives(rank: int, world: int, directory: str, run: Run) -> list[list[str]]:
    """What of gloo training waits for in each of three saves."""
    engine, ledger = build(rank, world, run)
    waits = []
    for _ in range(3):
        train(engine, ledger, run, 1)
        with torch.profiler.profile() as profile:
            assert engine.save_checkpoint(directory)
        waits.append([event.name for event in profile.events() if event.name.startswith("gloo:")])
    engine.finish()
    return waits


def test_training_waits_for_one_agreement_and_for_deepspeed(workers: Pools, tmp_path: Path) -> None:
    """DeepSpeed's own check of the tag would take two more collectives of every save."""
    run = Run(section={"checkpoint": {"persist_experts": 1}})
    for waits in workers(2)(collectives, str(tmp_path), run, timeout=60):
        assert waits == [["gloo:all_gather", "gloo:barrier", "gloo:barrier"]] * 3


def continued(rank: int, world: int, directory: str, run: Run) -> list[float]:
    engine, ledger = build(rank, world, run)
    path, client_state = engine.load_checkpoint(directory)
    assert path is not None
    assert client_state["at"] == SAVES * STEPS_BETWEEN
    return train(engine, ledger, run, 2).losses


def test_checkpoint_of_the_first_version(workers: Pools, tmp_path: Path) -> None:
    """DeepSpeed wrote the dense part then, and the manifest was a list of files."""
    run = dataclasses.replace(EXACT, section={"checkpoint": {}})
    workers(4)(save_often, str(tmp_path), run, timeout=120)
    expected = workers(3)(continued, str(tmp_path), run, timeout=120)
    tag = tmp_path / f"global_step{SAVES * STEPS_BETWEEN}"
    manifest = Manifest.read(str(tag))
    state = read_dense(str(tmp_path), manifest)
    shutil.rmtree(tag / "dense")
    torch.save(state, tag / "mp_rank_00_model_states.pt")
    body = {name: getattr(manifest, name) for name in ("tag", "generation", "global_steps", "model")}
    body["version"] = 1
    body["files"] = [
        {
            "name": str(path.relative_to(tag)),
            "bytes": path.stat().st_size,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }
        for path in sorted([*tag.glob("*.pt"), *tag.glob("experts/*")])
    ]
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    (tag / "manifest.json").write_text(json.dumps({"sha256": digest, "manifest": body}, indent=1))
    assert workers(3)(continued, str(tmp_path), run, timeout=120) == expected


def _written(folder: str, step: int, layer: int, field: str) -> set[int]:
    """The experts whose ``field`` the save of ``step`` wrote, as its manifest says."""
    tag = f"global_step{step}"
    body = json.loads(Path(folder, tag, "manifest.json").read_text())["manifest"]
    return {
        entry["expert"]
        for entry in body["experts"]
        for part in entry["parts"]
        if entry["layer"] == layer and part["tag"] == tag and field in part["fields"]
    }
