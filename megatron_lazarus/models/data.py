"""Train, validation and test data: Megatron's GPT data sets, read by step and micro-batch number.

What a micro-batch holds depends on (step, number) only: not on the rank that asks, the number of ranks, or
``--train-iters``. Every rank can therefore compute any micro-batch, and a run that is stopped, resized or prolonged
goes on with the samples it would have had.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from megatron_lazarus.models.tokenizer import TokenizerIdentity

Batch = dict[str, torch.Tensor]
_INDEX_HEADER = struct.Struct("<9sQBQQ")
_INDEX_MAGIC = b"MMIDIDX\x00\x00"
_TOKEN_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 8, 7: 4, 8: 2}
SPLITS = ("train", "validation", "test")


class SampleSource(Protocol):
    """Samples by number: any map-style data set."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]: ...


@dataclass(frozen=True)
class DataConfig:
    """What data to read.

    ``prefixes`` and ``weights`` are the blend (equal length, weights need not sum to 1); ``split`` are the shares of
    train, validation and test; ``seq_length`` is in tokens; ``cache`` is the folder for sample indices.
    """

    prefixes: tuple[str, ...]
    weights: tuple[float, ...]
    split: str
    seq_length: int
    seed: int
    cache: Path
    mmap: bool = True


def parse_data_path(words: Sequence[str]) -> tuple[tuple[str, ...], tuple[float, ...]]:
    """Read ``--data-path``: one prefix, or pairs of weight and prefix; return (prefixes, weights).

    Raises ValueError for any other form or a weight that is not positive.
    """
    if len(words) == 1:
        return (words[0],), (1.0,)
    try:
        weights = tuple(float(word) for word in words[0::2])
    except ValueError:
        weights = ()
    if not words or len(words) % 2 or len(weights) != len(words) // 2 or not all(0 < w < float("inf") for w in weights):
        raise ValueError(f"--data-path is {' '.join(words)!r}; give PREFIX, or pairs WEIGHT PREFIX with weights > 0")
    return tuple(words[1::2]), weights


def check_files(prefix: str, tokenizer: TokenizerIdentity | None = None) -> None:
    """Raise ValueError, naming the file and its sizes, unless ``prefix`` is a whole data set of ``tokenizer``."""
    index, data = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    for file in (index, data):
        if not file.is_file():
            raise ValueError(f"--data-path: {file} does not exist (the prefix is the path without .bin or .idx)")
    actual = index.stat().st_size
    with index.open("rb") as stream:
        header = stream.read(_INDEX_HEADER.size)
    if len(header) < _INDEX_HEADER.size:
        raise ValueError(f"{index} is truncated: {actual} bytes, the header alone has {_INDEX_HEADER.size}")
    magic, version, code, sequences, documents = _INDEX_HEADER.unpack(header)
    if magic != _INDEX_MAGIC or version != 1 or code not in _TOKEN_BYTES:
        raise ValueError(f"{index} is not a Megatron index of version 1")
    expected = _INDEX_HEADER.size + sequences * (4 + 8) + documents * 8
    if actual < expected:
        raise ValueError(f"{index} is truncated: {actual} bytes where its header promises {expected}")
    lengths = np.memmap(index, np.int32, "r", _INDEX_HEADER.size, (sequences,)) if sequences else np.zeros(1, np.int32)
    expected = int(lengths.sum(dtype=np.int64)) * _TOKEN_BYTES[code]
    actual = data.stat().st_size
    if actual < expected:
        raise ValueError(f"{data} is truncated: {actual} bytes where {index} promises {expected}")
    if expected == 0:
        raise ValueError(f"{data} holds no token")
    if tokenizer is not None:
        tokenizer.check(prefix)


def unigram_entropy(prefix: str) -> float:
    """Entropy of the token frequencies of the data at ``prefix``, nats per token.

    It is the loss of a model that knows how frequent each token is and nothing else.
    """
    from megatron_lazarus.models.megatron import IndexedDataset

    check_files(prefix)
    tokens = np.memmap(f"{prefix}.bin", IndexedDataset(prefix).index.dtype, "r")
    counts = np.zeros(0, np.int64)
    for start in range(0, len(tokens), 1 << 24):
        chunk = np.bincount(tokens[start : start + (1 << 24)], minlength=len(counts))
        chunk[: len(counts)] += counts
        counts = chunk
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


class Blend:
    """An endless sequence of samples from one epoch or many of one data set or several.

    Samples of each data set come epoch by epoch, the first in its own order, each later one in an order of its own;
    data sets take turns so that at any time each has had its share, within one sample.
    """

    def __init__(self, sources: Sequence[SampleSource], weights: Sequence[float], seed: int) -> None:
        self._sources = sources
        self._weights = np.asarray(weights, np.float64) / sum(weights)
        self._seed = seed
        self._turns = (np.zeros(0, np.int16), np.zeros(0, np.int64))
        self._orders: dict[int, tuple[int, np.ndarray]] = {}

    @property
    def samples_per_epoch(self) -> int:
        """Number of distinct samples in all data sets."""
        return sum(len(source) for source in self._sources)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Return sample ``index`` >= 0 of the sequence."""
        source, position = self.locate(index)
        return self._sources[source][position]

    def locate(self, index: int) -> tuple[int, int]:
        """Return which data set sample ``index`` comes from, and its number in there."""
        source, turn = self._turn(index)
        epoch, position = divmod(turn, len(self._sources[source]))
        return source, position if epoch == 0 else int(self._order(source, epoch)[position])

    def _turn(self, index: int) -> tuple[int, int]:
        if len(self._sources) == 1:
            return 0, index
        if index >= len(self._turns[0]):
            from megatron_lazarus.models.megatron import dataset_helpers

            # The greedy turns of a longer sequence begin with those of a shorter one.
            size = max(2 * index, 1 << 16)
            self._turns = (np.zeros(size, np.int16), np.zeros(size, np.int64))
            dataset_helpers.build_blending_indices(*self._turns, self._weights, len(self._sources), size, False)
        return int(self._turns[0][index]), int(self._turns[1][index])

    def _order(self, source: int, epoch: int) -> np.ndarray:
        known = self._orders.get(source)
        if known is None or known[0] != epoch:
            generator = np.random.default_rng([self._seed, source, epoch])
            known = self._orders[source] = (epoch, generator.permutation(len(self._sources[source])))
        return known[1]


class MicroBatches:
    """Global batches of ``global_batch_size`` samples, each cut into micro-batches of ``micro_batch_size``."""

    def __init__(self, samples: Blend, micro_batch_size: int, global_batch_size: int) -> None:
        if micro_batch_size < 1 or global_batch_size < 1 or global_batch_size % micro_batch_size:
            raise ValueError(
                f"global batch of {global_batch_size} samples and micro-batch of {micro_batch_size}: "
                "both must be positive and the first a multiple of the second"
            )
        self.samples = samples
        self.micro_batch_size = micro_batch_size
        self.global_batch_size = global_batch_size

    def sample_numbers(self, step: int, m: int) -> range:
        """Numbers of the samples of micro-batch ``m`` of the global batch of ``step``, both from 0.

        Raises ValueError if the global batch has no such micro-batch.
        """
        if step < 0 or not 0 <= m < self.global_batch_size // self.micro_batch_size:
            raise ValueError(
                f"no micro-batch {m} of step {step}: steps start at 0 and have "
                f"{self.global_batch_size // self.micro_batch_size} micro-batches"
            )
        start = step * self.global_batch_size + m * self.micro_batch_size
        return range(start, start + self.micro_batch_size)

    def micro_batch(self, step: int, m: int) -> Batch:
        """Return ``tokens``, ``labels`` (int64) and ``loss_mask`` (fp32), [micro-batch size, sequence], on the CPU."""
        return self._collate(self.sample_numbers(step, m))

    def fixed(self, step: int, m: int) -> Batch:
        """Return the ``m``-th micro-batch from the start, whatever the step, so that every evaluation sees the same."""
        return self._collate(range(m * self.micro_batch_size, (m + 1) * self.micro_batch_size))

    def _collate(self, numbers: range) -> Batch:
        samples = [self.samples[number] for number in numbers]
        return {key: torch.stack([sample[key] for sample in samples]) for key in ("tokens", "labels", "loss_mask")}


def build_blends(config: DataConfig, tokenizer: Any, identity: TokenizerIdentity) -> dict[str, Blend]:
    """Return split name -> samples, for the splits with a share above 0.

    Call it before any process group exists, or on all ranks at once. Sample indices are kept in ``config.cache``,
    under a name that also covers the size and time of the data files; one process a host builds them. Raises
    ValueError for missing, truncated or mismatching files and for a split too small for one sample.
    """
    for prefix in config.prefixes:
        check_files(prefix, identity)
    per_prefix = [_build(config, prefix, tokenizer) for prefix in config.prefixes]
    blends = {}
    for name, datasets in zip(SPLITS, zip(*per_prefix, strict=True), strict=True):
        if datasets[0] is None:
            continue
        for prefix, dataset in zip(config.prefixes, datasets, strict=True):
            if len(dataset) < 1:
                raise ValueError(
                    f"the {name} part of {prefix} under --split {config.split} has no sample of "
                    f"{config.seq_length} + 1 tokens; enlarge its share or shorten --seq-length"
                )
        blends[name] = Blend(datasets, config.weights, config.seed)
    return blends


def _build(config: DataConfig, prefix: str, tokenizer: Any) -> list[Any]:
    from megatron_lazarus.models.megatron import BlendedMegatronDatasetBuilder, GPTDataset, GPTDatasetConfig

    facts = [os.path.abspath(prefix), config.split, config.seq_length, config.seed, tokenizer.vocab_size]
    for suffix in (".bin", ".idx"):
        status = os.stat(prefix + suffix)
        facts += [status.st_size, status.st_mtime_ns]
    folder = config.cache / hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]

    def build(cache: Path) -> list[Any]:
        settings = GPTDatasetConfig(
            random_seed=config.seed,
            sequence_length=config.seq_length,
            blend=([prefix], None),
            split=config.split,
            path_to_cache=str(cache),
            tokenizer=tokenizer,
            mmap_bin_files=config.mmap,
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            create_attention_mask=False,
        )
        return BlendedMegatronDatasetBuilder(GPTDataset, [None, None, None], lambda: True, settings).build()

    if torch.distributed.is_initialized():
        # Megatron's own order holds here: rank 0 builds, the others wait in a barrier. A lock would hold them apart.
        return build(folder)
    config.cache.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_suffix(".lock")):
        if not folder.exists():
            temporary = folder.with_suffix(".tmp")
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
            build(temporary)
            temporary.rename(folder)
        return build(folder)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
