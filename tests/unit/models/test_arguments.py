"""The command line: what contradicts itself is refused by name before anything starts."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from megatron_lazarus.models.arguments import check_arguments, parse_arguments
from megatron_lazarus.models.gpt import GPTConfig
from megatron_lazarus.models.progress import Progress, validation_lines
from megatron_lazarus.models.settings import (
    build_optimizer,
    data_config,
    deepspeed_config,
    learning_rate_factor,
    model_config,
    tera_flops_per_step,
)
from megatron_lazarus.models.tokenizer import build_tokenizer, padded_vocab_size
from megatron_lazarus.pretrain_gpt import main

BASE = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 "
    "--micro-batch-size 2 --global-batch-size 8 --train-iters 100 --lr 1e-3 --data-path data"
)


def parse(extra: str = "") -> argparse.Namespace:
    return parse_arguments(f"{BASE} {extra}".split())


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ("--tensor-model-parallel-size 2", "--tensor-model-parallel-size"),
        ("--pipeline-model-parallel-size 2", "--pipeline-model-parallel-size"),
        ("--fp16", "--fp16.*--bf16"),
        ("--zero-stage 1", "--zero-stage"),
        ("--use-tutel", "--use-tutel"),
        ("--enable-expert-tensor-parallelism", "--enable-expert-tensor-parallelism"),
        ("--num-experts 4 8", r"--num-experts is \[4, 8\]"),
        ("--num-experts 0", "--num-experts is 0"),
        ("--num-experts 4 --topk 5", "--topk is 5.*4"),
        ("--num-experts 4 --expert-interval 3", "--expert-interval is 3"),
        ("--num-experts 4 --moe-train-capacity-factor 0", "--moe-train-capacity-factor"),
        ("--num-experts 4 --moe-router-bias-update-rate 0.1", "sigmoid"),
        ("--num-attention-heads 5", "--hidden-size is 32.*5"),
        ("--num-query-groups 3", "--num-query-groups is 3"),
        ("--max-position-embeddings 8", "--seq-length is 16.*8"),
        ("--hidden-dropout 1", "--hidden-dropout"),
        ("--bf16 --fp32", "--fp32, --bf16"),
        ("--min-lr 1", "--min-lr"),
        ("--lr-warmup-iters 100", "--lr-warmup-iters is 100"),
        ("--save-interval 5", "needs --save"),
        ("--train-iters 0", "--train-iters is 0"),
    ],
)
def test_contradictions_are_refused_by_name(extra: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_arguments(parse(extra))


def test_defaults_are_those_of_the_field() -> None:
    args = parse()
    check_arguments(args)
    config = model_config(args, 256)
    assert (config.topk, config.expert_interval, config.moe_loss_coeff, config.moe_min_capacity) == (1, 2, 0.1, 4)
    assert config.moe_drop_tokens
    assert config.moe_top2_2nd_expert_sampling
    assert model_config(parse("--recompute-activations"), 256).recompute == "selective"
    assert not model_config(parse("--disable-moe-token-dropping"), 256).moe_drop_tokens


def write(path: Path, content: object) -> str:
    path.write_text(json.dumps(content), encoding="utf-8")
    return str(path)


def test_json_and_arguments_must_agree(tmp_path: Path) -> None:
    file = write(tmp_path / "a.json", {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 4})
    with pytest.raises(ValueError, match=r"--micro-batch-size is 2 but train_micro_batch_size_per_gpu.* is 4"):
        deepspeed_config(parse(f"--deepspeed_config {file}"))
    file = write(tmp_path / "b.json", {"train_batch_size": 8, "bf16": {"enabled": True}})
    args = parse(f"--deepspeed_config {file}")
    assert deepspeed_config(args)["train_micro_batch_size_per_gpu"] == 2
    assert args.bf16
    with pytest.raises(ValueError, match=r"--fp32.*bf16\.enabled"):
        deepspeed_config(parse(f"--deepspeed_config {file} --fp32"))
    with pytest.raises(ValueError, match="multiple of --micro-batch-size"):
        deepspeed_config(parse("--micro-batch-size 3"))
    with pytest.raises(ValueError, match="does not exist"):
        deepspeed_config(parse("--deepspeed_config nowhere.json"))


@pytest.mark.parametrize("split", ["1,2", "a,b,c", "0,1,1", "1,-1,0"])
def test_split_is_checked(split: str) -> None:
    with pytest.raises(ValueError, match="--split"):
        data_config(parse(f"--split {split}"))


def test_learning_rate_schedule() -> None:
    factor = learning_rate_factor(parse("--lr-warmup-iters 10 --min-lr 1e-4 --lr-decay-style cosine"))
    assert [factor(step) for step in (0, 5, 10)] == [0.0, 0.5, 1.0]
    assert factor(55) == pytest.approx(0.55)
    assert factor(100) == pytest.approx(0.1)
    assert factor(1000) == pytest.approx(0.1)
    linear = learning_rate_factor(parse("--lr-decay-style linear"))
    assert linear(25) == pytest.approx(0.75)
    assert learning_rate_factor(parse("--lr-decay-style constant"))(99) == 1.0


def test_weight_decay_spares_biases_and_norms() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    decayed, others = build_optimizer(parse("--weight-decay 0.1"), model).param_groups
    assert [p.dim() for p in decayed["params"]] == [2]
    assert [p.dim() for p in others["params"]] == [1, 1, 1]
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert isinstance(build_optimizer(parse("--optimizer sgd"), model), torch.optim.SGD)


def test_flops_of_a_dense_layer() -> None:
    config = GPTConfig(100, 1, 64, 4, 32, 32)
    per_token = 3 * (8 * 64 * 64 + 4 * 32 * 64 + 16 * 64 * 64 + 2 * 64 * 100)
    assert tera_flops_per_step(config, 8) * 1e12 == pytest.approx(per_token * 8 * 32)
    moe = GPTConfig(100, 2, 64, 4, 32, 32, num_experts=8, topk=2)
    dense = GPTConfig(100, 2, 64, 4, 32, 32)
    extra = tera_flops_per_step(moe, 1) - tera_flops_per_step(dense, 1)
    assert extra * 1e12 == pytest.approx(3 * 16 * 64 * 64 * 32)


class Result:
    loss, grad_norm, skipped = 2.0, 1.5, False

    def __init__(self, loss: float = 2.0, skipped: bool = False) -> None:
        self.loss, self.skipped = loss, skipped
        self.metrics = {"lm loss": loss, "moe loss": 0.01}


def test_log_line_has_the_fields_that_tools_look_for() -> None:
    progress = Progress(parse(), tera_flops_per_step=1.0)
    for result in (Result(2.0), Result(4.0), Result(math.nan, skipped=True), Result(9.0, skipped=True)):
        progress.add(result)
    line = progress.line(5, 1e-4, world_size=4)
    assert line.startswith(" iteration        5/     100 | consumed samples:           40 | consumed tokens:")
    for part in (
        "| learning rate: 1.000E-04 | global batch size:     8 | lm loss: 3.000000E+00 | moe loss: 1.000000E-02 |",
        "| grad norm: 1.500 | number of skipped iterations:   2 | number of nan iterations:   1 |",
    ):
        assert part in line
    assert line.endswith(" |")
    assert "lm loss PPL: 7.389056E+00" in validation_lines("iteration 5", 2.0)[1]


def test_tokenizer_options_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs --tokenizer-model"):
        build_tokenizer("HuggingFaceTokenizer")
    with pytest.raises(ValueError, match="which is not a file"):
        build_tokenizer("TikTokenizer", str(tmp_path / "none.json"))
    with pytest.raises(ValueError, match="must be one of"):
        build_tokenizer("WordTokenizer")
    assert padded_vocab_size(258, 128) == 384
    assert padded_vocab_size(256, 128) == 256


def test_gpt2_files_are_read_without_a_download(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    characters = [chr(code) for code in range(33, 127)] + ["\u0120", "he", "<|endoftext|>"]
    vocabulary = write(tmp_path / "v.json", {character: number for number, character in enumerate(characters)})
    (tmp_path / "m.txt").write_text("#version: 0.2\nh e\n", encoding="utf-8")
    tokenizer = build_tokenizer("GPT2BPETokenizer", vocab_file=vocabulary, merge_file=str(tmp_path / "m.txt"))
    again = build_tokenizer("GPT2BPETokenizer", vocab_file=vocabulary, merge_file=str(tmp_path / "m.txt"))
    assert tokenizer.detokenize(tokenizer.tokenize("she said hey")) == "she said hey"
    assert (tokenizer.vocab_size, tokenizer.eod) == (97, 96)
    assert tokenizer.unique_identifiers == again.unique_identifiers


def test_byte_level_is_lossless() -> None:
    tokenizer = build_tokenizer("ByteLevelTokenizer")
    text = "zero \x00 one \x01 and café"
    assert tokenizer.detokenize([*tokenizer.tokenize(text), tokenizer.eod]) == text
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad) == (258, 257, 256)


def test_errors_end_in_one_line_before_any_process_group(
    dataset: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix = dataset(["some text to train on " * 20] * 20)
    bad = write(tmp_path / "bad.json", {"lazarus": {"experts": {"slots": 3}}})
    few = write(tmp_path / "few.json", {"lazarus": {"experts": {"slots_per_rank": 3}}})
    fp16 = write(tmp_path / "fp16.json", {"fp16": {"enabled": True}})
    for extra, message in (
        (f"--data-path {tmp_path}/none", "none.idx does not exist"),
        (f"--data-path {prefix} --num-experts 4 --topk 9", "--topk is 9"),
        (f"--data-path {prefix} --deepspeed_config {bad}", "lazarus.experts.slots"),
        (f"--data-path {prefix} --deepspeed_config {few} --num-experts 8", "least legal value is 8"),
        (f"--data-path {prefix} --deepspeed_config {fp16}", "fp16"),
    ):
        assert main(f"{BASE} {extra}".split()) == 2
        error = capsys.readouterr().err
        assert error.startswith("pretrain_gpt: ")
        assert error.count("\n") == 1
        assert message in error
    assert not torch.distributed.is_initialized()
