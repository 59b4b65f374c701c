"""The entry point, run as a user runs it without a launcher: one process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_lazarus.checkpoint.files import CheckpointError
from megatron_lazarus.checkpoint.manifest import Manifest
from megatron_lazarus.models.compatibility import check_checkpoint
from megatron_lazarus.models.gpt import GPTConfig


def run(options: str) -> str:
    """Run pretrain_gpt; return what it printed."""
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    result = subprocess.run(
        [sys.executable, "-m", "megatron_lazarus.pretrain_gpt", *options.split()],
        env=environment,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def losses(output: str) -> dict[int, str]:
    """Iteration -> its loss, as printed."""
    return {int(i): loss for i, loss in re.findall(r"iteration +(\d+)/.*? lm loss: (\S+)", output)}


def test_train_save_and_resume(dataset: Callable[..., str], tmp_path: Path) -> None:
    prefix = dataset([f"passage {number} of a text to learn from. " * 10 for number in range(60)])
    options = (
        "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 "
        "--num-experts 4 --topk 2 --micro-batch-size 2 --global-batch-size 6 --train-iters 6 --lr 1e-2 "
        f"--log-interval 1 --eval-interval 2 --eval-iters 1 --split 80,10,10 --data-path {prefix} --save {tmp_path}/ck "
        f"--load {tmp_path}/ck --recompute-granularity full "
    )
    straight = run(f"{options} --save {tmp_path}/other --load {tmp_path}/other --log-unigram-entropy")
    assert list(losses(straight)) == [1, 2, 3, 4, 5, 6]
    assert straight.count("validation loss at iteration") == 4
    assert "unigram entropy" in straight

    first = run(f"{options} --exit-interval 3")
    assert "exiting program at iteration 3" in first
    assert (tmp_path / "ck" / "latest_checkpointed_iteration.txt").read_text() == "3"
    second = run(options)
    assert "successfully loaded checkpoint" in second
    assert losses(first) | losses(second) == losses(straight)

    finetuned = run(f"{options} --finetune --train-iters 1 --eval-iters 0 --save {tmp_path}/tuned")
    assert list(losses(finetuned)) == [1]


def test_another_model_is_told_before_anything_starts(tmp_path: Path) -> None:
    config = GPTConfig(96, 2, 32, 4, 16, 16, num_experts=4)
    check_checkpoint(str(tmp_path), config)
    dense = {
        "gpt.embedding.word_embeddings.weight": [96, 32],
        "gpt.embedding.position_embeddings.weight": [16, 32],
        "gpt.decoder.layers.0.self_attention.linear_qkv.weight": [96, 32],
        "gpt.decoder.layers.1.self_attention.linear_qkv.weight": [96, 32],
    }
    model = {"dense": dense, "moe_layers": [{"num_experts": 4, "tensors": {"fc2.weight": [32, 128]}}]}
    (tmp_path / "tag").mkdir()
    (tmp_path / "latest").write_text("tag")
    Manifest("tag", 0, 3, model, []).write(str(tmp_path / "tag"))
    check_checkpoint(str(tmp_path), config)
    for changed, message in (
        (GPTConfig(96, 2, 64, 4, 16, 16, num_experts=4), "--hidden-size is 32 there and 64 here"),
        (GPTConfig(96, 2, 32, 4, 16, 16, num_experts=8), r"--num-experts is \[4\] there and \[8\] here"),
        (GPTConfig(96, 4, 32, 4, 16, 16, num_experts=4), "--num-layers is 2 there and 4 here"),
        (GPTConfig(128, 2, 32, 4, 16, 16, num_experts=4), "vocabulary is 96 there and 128 here"),
    ):
        with pytest.raises(CheckpointError, match=message):
            check_checkpoint(str(tmp_path), changed)
