"""Text to Megatron's indexed data sets (``.bin`` and ``.idx``)."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from megatron_lazarus.models.tokenizer import BYTE_LEVEL, TOKENIZER_TYPES, build_tokenizer, identity

_tokenizer: Any = None


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line of ``preprocess_data``."""
    parser = argparse.ArgumentParser(description="Write Megatron indexed data sets from text.")
    parser.add_argument(
        "--input",
        required=True,
        nargs="+",
        help="files or folders; .jsonl and .json hold one JSON object a line, any other file is plain text",
    )
    parser.add_argument("--output-prefix", required=True, help="output is <prefix>_<key>_document.bin, .idx, …")
    parser.add_argument("--json-keys", nargs="+", default=["text"], help="one data set is written for each key")
    parser.add_argument("--split-documents", metavar="LINE", help="in plain text, a line equal to LINE ends a document")
    parser.add_argument("--tokenizer-type", default=BYTE_LEVEL, choices=TOKENIZER_TYPES)
    parser.add_argument("--tokenizer-model")
    parser.add_argument("--vocab-file")
    parser.add_argument("--merge-file")
    parser.add_argument("--append-eod", action="store_true", help="end every document with the tokenizer's eod token")
    parser.add_argument("--workers", type=int, default=1)
    return parser.parse_args(argv)


def preprocess(arguments: argparse.Namespace) -> dict[str, int]:
    """Write one data set for each key; return prefix -> number of tokens.

    Files are written under other names and renamed at the end, the index last, so a data set that has an index is
    whole. Raises ValueError for missing input, a key that a line lacks, or input without any text.
    """
    if arguments.workers < 1:
        raise ValueError(f"--workers is {arguments.workers}; it must be at least 1")
    files = [file for name in arguments.input for file in _files(Path(name))]
    make = partial(
        build_tokenizer,
        arguments.tokenizer_type,
        arguments.tokenizer_model,
        arguments.vocab_file,
        arguments.merge_file,
    )
    return {
        prefix: _write(prefix, key, files, make, arguments)
        for key in arguments.json_keys
        for prefix in (f"{arguments.output_prefix}_{key}_document",)
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    try:
        written = preprocess(parse_arguments(argv))
    except ValueError as error:
        raise SystemExit(f"preprocess_data: {error}") from None
    for prefix, tokens in written.items():
        print(f"{prefix}: {tokens} tokens")
    return 0


def _write(prefix: str, key: str, files: Sequence[Path], make: Any, arguments: argparse.Namespace) -> int:
    import torch

    from megatron_lazarus.models.megatron import DType, IndexedDatasetBuilder

    tokenizer = make()
    Path(prefix).parent.mkdir(parents=True, exist_ok=True)
    temporary = {suffix: f"{prefix}{suffix}.{os.getpid()}.tmp" for suffix in (".bin", ".idx")}
    dtype = DType.optimal_dtype(tokenizer.vocab_size)
    builder = IndexedDatasetBuilder(temporary[".bin"], dtype=dtype)
    eod = [tokenizer.eod] if arguments.append_eod else []
    total = 0
    try:
        documents = _documents(files, key, arguments.split_documents)
        for ids in _tokenized(documents, make, arguments.workers):
            if ids:
                builder.add_item(torch.from_numpy(np.array([*ids, *eod], dtype=dtype)))
                builder.end_document()
                total += len(ids) + len(eod)
        if total == 0:
            raise ValueError(f"no text under key {key!r} in {', '.join(arguments.input)}")
        builder.finalize(temporary[".idx"])
        # An old index must not meet the new data, nor a new index the old side file.
        Path(f"{prefix}.idx").unlink(missing_ok=True)
        os.replace(temporary[".bin"], f"{prefix}.bin")
        identity(arguments.tokenizer_type, tokenizer).write(prefix)
        os.replace(temporary[".idx"], f"{prefix}.idx")
    finally:
        builder.data_file.close()
        for name in temporary.values():
            Path(name).unlink(missing_ok=True)
    return total


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    found = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else []
    if not found:
        raise ValueError(f"--input {path}: no such file, and no folder with files")
    return found


def _documents(files: Sequence[Path], key: str, separator: str | None) -> Iterator[str]:
    for file in files:
        if file.suffix in (".jsonl", ".json"):
            with file.open(encoding="utf-8") as lines:
                for number, line in enumerate(lines, start=1):
                    if line.strip():
                        yield _field(file, number, line, key)
        else:
            text = file.read_text(encoding="utf-8", errors="replace")
            yield from f"\n{text}\n".split(f"\n{separator}\n") if separator else [text]


def _field(file: Path, number: int, line: str, key: str) -> str:
    try:
        value = json.loads(line)[key]
    except (json.JSONDecodeError, KeyError, TypeError, IndexError) as error:
        raise ValueError(f"{file}, line {number}: expected a JSON object with key {key!r} ({error!r})") from error
    if not isinstance(value, str):
        raise ValueError(f"{file}, line {number}: {key!r} holds {type(value).__name__}; it must hold a string")
    return value


def _tokenized(documents: Iterator[str], make: Any, workers: int) -> Iterator[list[int]]:
    if workers == 1:
        _start(make)
        yield from map(_tokenize, documents)
        return
    with get_context("fork").Pool(workers, initializer=_start, initargs=(make,)) as pool:
        yield from pool.imap(_tokenize, documents, chunksize=16)


def _start(make: Any) -> None:
    global _tokenizer
    _tokenizer = make()


def _tokenize(text: str) -> list[int]:
    text = text.strip("\n")
    return _tokenizer.tokenize(text) if text else []
