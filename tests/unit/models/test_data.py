"""Data sets: what is written is read back, by step and micro-batch; what is broken is named."""

from __future__ import annotations

import json
import math
import struct
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_lazarus.models.data import (
    Blend,
    DataConfig,
    MicroBatches,
    build_blends,
    check_files,
    parse_data_path,
    unigram_entropy,
)
from megatron_lazarus.models.megatron import IndexedDataset
from megatron_lazarus.models.preprocess import parse_arguments, preprocess
from megatron_lazarus.models.tokenizer import BYTE_LEVEL, TokenizerIdentity, build_tokenizer, identity

Build = Callable[..., str]
DOCUMENTS = [f"document {number} says " + "abcdefghij"[number % 10] * 40 for number in range(60)]


class Numbers:
    """A data set whose samples are their own numbers."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {key: torch.full((2,), index) for key in ("tokens", "labels", "loss_mask")}


def blends(prefix: str, cache: Path, **changes: object) -> dict[str, Blend]:
    tokenizer = build_tokenizer(BYTE_LEVEL)
    settings = {
        "prefixes": (prefix,),
        "weights": (1.0,),
        "split": "80,15,5",
        "seq_length": 8,
        "seed": 7,
        "cache": cache,
    }
    return build_blends(DataConfig(**{**settings, **changes}), tokenizer, identity(BYTE_LEVEL, tokenizer))


def test_preprocess_round_trip(tmp_path: Path) -> None:
    texts = ["plain, first\nsecond line", "naïve café ☕"]
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("\n---\n".join(texts), encoding="utf-8")
    records = [{"text": "one", "title": "t1"}, {"text": "two", "title": "t2"}]
    (tmp_path / "in" / "b.jsonl").write_text("\n\n".join(map(json.dumps, records)), encoding="utf-8")
    command = ["--input", str(tmp_path / "in" / "a.txt"), "--split-documents=---", "--append-eod"]
    tokenizer = build_tokenizer(BYTE_LEVEL)

    ((prefix, tokens),) = preprocess(parse_arguments([*command, "--output-prefix", str(tmp_path / "x")])).items()
    dataset = IndexedDataset(prefix)
    assert [tokenizer.detokenize(dataset[i]) for i in range(len(dataset))] == texts
    assert all(dataset[i][-1] == tokenizer.eod for i in range(len(dataset)))
    assert tokens == sum(len(dataset[i]) for i in range(len(dataset)))

    command = ["--input", str(tmp_path / "in" / "b.jsonl"), "--json-keys", "text", "title", "--workers", "2"]
    written = preprocess(parse_arguments([*command, "--output-prefix", str(tmp_path / "y")]))
    assert [prefix.rsplit("_", 2)[1] for prefix in written] == ["text", "title"]
    titles = IndexedDataset(list(written)[1])
    assert [tokenizer.detokenize(titles[i]) for i in range(len(titles))] == ["t1", "t2"]
    assert not list(tmp_path.glob("*.tmp"))


def test_preprocess_leaves_nothing_half_written(tmp_path: Path, dataset: Build) -> None:
    prefix = dataset(DOCUMENTS)
    before = Path(f"{prefix}.bin").read_bytes()
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "fine"}\n{"title": "no text"}\n', encoding="utf-8")
    with pytest.raises(ValueError, match=r"bad\.jsonl, line 2.*'text'"):
        preprocess(parse_arguments(["--input", str(bad), "--output-prefix", prefix.removesuffix("_text_document")]))
    assert Path(f"{prefix}.bin").read_bytes() == before
    assert not list(tmp_path.glob("*.tmp"))
    with pytest.raises(ValueError, match="no such file"):
        preprocess(parse_arguments(["--input", str(tmp_path / "none"), "--output-prefix", str(tmp_path / "z")]))


def test_tokenizer_mismatch_names_both(dataset: Build) -> None:
    prefix = dataset(DOCUMENTS)
    with pytest.raises(ValueError, match=r"ByteLevelTokenizer.*vocab_size=258.*HuggingFaceTokenizer.*vocab_size=50257"):
        check_files(prefix, TokenizerIdentity("HuggingFaceTokenizer", 50257, 50256))
    Path(f"{prefix}.tokenizer.json").unlink()
    check_files(prefix, TokenizerIdentity("HuggingFaceTokenizer", 50257, 50256))


def test_missing_and_truncated_files_are_named(dataset: Build) -> None:
    prefix = dataset(DOCUMENTS)
    data, index = Path(f"{prefix}.bin"), Path(f"{prefix}.idx")
    whole, whole_index = data.read_bytes(), index.read_bytes()
    data.write_bytes(whole[:-2])
    with pytest.raises(ValueError, match=rf"{data} is truncated: {len(whole) - 2} bytes .* promises {len(whole)}"):
        check_files(prefix)
    data.write_bytes(whole)
    index.write_bytes(whole_index[:-8])
    with pytest.raises(ValueError, match=rf"{index} is truncated: {len(whole_index) - 8} .* {len(whole_index)}"):
        check_files(prefix)
    index.write_bytes(whole_index[:20])
    with pytest.raises(ValueError, match="truncated: 20 bytes"):
        check_files(prefix)
    index.write_bytes(struct.pack("<9sQBQQ", b"something", 1, 8, 0, 0))
    with pytest.raises(ValueError, match="not a Megatron index"):
        check_files(prefix)
    index.unlink()
    with pytest.raises(ValueError, match=rf"{index} does not exist"):
        check_files(prefix)


def test_micro_batches_depend_on_step_and_number_only(dataset: Build, tmp_path: Path) -> None:
    prefix = dataset(DOCUMENTS)
    first = MicroBatches(blends(prefix, tmp_path / "cache")["train"], 2, 6)
    again = MicroBatches(blends(prefix, tmp_path / "other")["train"], 2, 6)
    for step, m in [(0, 0), (3, 2), (1, 1), (40, 0)]:
        batch = first.micro_batch(step, m)
        assert batch["tokens"].shape == batch["labels"].shape == batch["loss_mask"].shape == (2, 8)
        assert torch.equal(batch["tokens"][:, 1:], batch["labels"][:, :-1])
        assert all(torch.equal(batch[key], value) for key, value in again.micro_batch(step, m).items())
    with pytest.raises(ValueError, match="no micro-batch 3"):
        first.micro_batch(0, 3)


@pytest.mark.parametrize("micro", [1, 2, 3, 6])
def test_every_sample_is_used_once_an_epoch_however_it_is_cut(micro: int) -> None:
    batches = MicroBatches(Blend([Numbers(18)], [1.0], seed=3), micro, 6)
    epochs = []
    for epoch in range(3):
        steps = range(3 * epoch, 3 * epoch + 3)
        numbers = [batches.micro_batch(step, m)["tokens"][:, 0].tolist() for step in steps for m in range(6 // micro)]
        epochs.append([number for part in numbers for number in part])
    assert all(sorted(epoch) == list(range(18)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    reference = MicroBatches(Blend([Numbers(18)], [1.0], seed=3), 6, 6)
    assert epochs[2] == [n for step in (6, 7, 8) for n in reference.micro_batch(step, 0)["tokens"][:, 0].tolist()]


def test_blend_keeps_its_shares_and_its_past() -> None:
    sources = [Numbers(1000), Numbers(50)]
    blend = Blend(sources, [3.0, 1.0], seed=0)
    early = [blend.locate(index) for index in range(400)]
    shares = Counter(source for source, _ in early)
    assert shares == {0: 300, 1: 100}
    blend.locate(200_000)
    assert [blend.locate(index) for index in range(400)] == early
    small = Counter(position for source, position in early if source == 1)
    assert set(small.values()) == {2}


def test_splits_do_not_share_documents(dataset: Build, tmp_path: Path) -> None:
    prefix = dataset([chr(33 + number) * 30 for number in range(90)])
    parts = blends(prefix, tmp_path / "cache", seq_length=4)
    letters = {
        name: {token for index in range(blend.samples_per_epoch) for token in blend[index]["tokens"].tolist()} - {257}
        for name, blend in parts.items()
    }
    assert [len(letters[name]) for name in ("train", "validation", "test")] == [72, 14, 4]
    assert len(set().union(*letters.values())) == 90


def test_cache_follows_the_data(dataset: Build, tmp_path: Path) -> None:
    first = blends(dataset(DOCUMENTS), tmp_path / "cache")["train"]
    length = first.samples_per_epoch
    second = blends(dataset(DOCUMENTS * 2), tmp_path / "cache")["train"]
    assert second.samples_per_epoch > 1.8 * length


def test_too_small_a_split_is_named(dataset: Build, tmp_path: Path) -> None:
    prefix = dataset(DOCUMENTS)
    with pytest.raises(ValueError, match=r"validation part of .*--split 99,1,0"):
        blends(prefix, tmp_path / "cache", split="99,1,0", seq_length=2000)


def test_data_path_forms() -> None:
    assert parse_data_path(["a"]) == (("a",), (1.0,))
    assert parse_data_path(["0.3", "a", "2", "b"]) == (("a", "b"), (0.3, 2.0))
    for words in (["a", "b"], ["1", "a", "2"], ["0", "a"], ["-1", "a"], ["nan", "a"]):
        with pytest.raises(ValueError, match="--data-path"):
            parse_data_path(words)


def test_unigram_entropy(dataset: Build) -> None:
    # Four documents of 3 + 1 tokens: a, b, c and the end four times each.
    assert unigram_entropy(dataset(["abc"] * 4)) == pytest.approx(math.log(4))
    text = "the quick brown fox"
    counts = np.array([*Counter(text).values(), 1])
    shares = counts / counts.sum()
    assert unigram_entropy(dataset([text], "fox")) == pytest.approx(-(shares * np.log(shares)).sum())
