"""Tokenizers by the names Megatron users know, and the side file that ties a data set to one of them."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

BYTE_LEVEL = "ByteLevelTokenizer"
SENTENCEPIECE = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")
NEEDS_MODEL = ("HuggingFaceTokenizer", "TikTokenizer", *SENTENCEPIECE)
TOKENIZER_TYPES = (BYTE_LEVEL, "GPT2BPETokenizer", *NEEDS_MODEL)
_LIBRARIES: dict[str, tuple[str, dict[str, Any]]] = {
    BYTE_LEVEL: (
        "byte-level",
        {"vocab_size": 256, "special_tokens": ["<eod>", "<pad>"], "_eos_id": 257, "_pad_id": 256},
    ),
    "HuggingFaceTokenizer": ("huggingface", {"use_fast": True}),
    "TikTokenizer": ("tiktoken", {}),
    **dict.fromkeys(SENTENCEPIECE, ("sentencepiece", {})),
}


@dataclass(frozen=True)
class TokenizerIdentity:
    """What a data set must have in common with the run that reads it."""

    tokenizer_type: str
    vocab_size: int
    eod: int

    def write(self, prefix: str) -> None:
        """Write ``<prefix>.tokenizer.json``, whole or not at all."""
        path = side_file(prefix)
        temporary = path.with_name(path.name + ".tmp")
        temporary.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        os.replace(temporary, path)

    def check(self, prefix: str) -> None:
        """Raise ValueError, naming both tokenizers, if the data at ``prefix`` was written with another one.

        Data without a side file comes from elsewhere and is taken on trust.
        """
        path = side_file(prefix)
        if not path.exists():
            return
        try:
            written = TokenizerIdentity(**json.loads(path.read_text(encoding="utf-8")))
        except (TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} is not a tokenizer side file ({error}); preprocess the data again") from error
        if written != self:
            raise ValueError(
                f"tokenizer mismatch: the data at {prefix} was written with {written}, this run has {self}; "
                "set --tokenizer-type and --tokenizer-model as at preprocessing, or preprocess the data again"
            )


def side_file(prefix: str) -> Path:
    """Path of the file that records the tokenizer of the data set at ``prefix``."""
    return Path(f"{prefix}.tokenizer.json")


def build_tokenizer(
    tokenizer_type: str,
    tokenizer_model: str | None = None,
    vocab_file: str | None = None,
    merge_file: str | None = None,
) -> Any:
    """Return Megatron Core's tokenizer (``tokenize``, ``detokenize``, ``vocab_size``, ``eod``).

    ``ByteLevelTokenizer`` needs no file: ids 0-255 are the bytes, 256 pads, 257 ends a document. Raises ValueError for
    an unknown type, a missing file, or a library that is not installed.
    """
    from megatron_lazarus.models.megatron import MegatronTokenizer

    if tokenizer_type not in TOKENIZER_TYPES:
        raise ValueError(f"--tokenizer-type is {tokenizer_type!r}; it must be one of {', '.join(TOKENIZER_TYPES)}")
    if tokenizer_type in NEEDS_MODEL and not tokenizer_model:
        raise ValueError(f"--tokenizer-type {tokenizer_type} needs --tokenizer-model")
    if tokenizer_type == "GPT2BPETokenizer" and not (vocab_file and merge_file):
        raise ValueError("--tokenizer-type GPT2BPETokenizer needs --vocab-file and --merge-file")
    for name, path in (("--vocab-file", vocab_file), ("--merge-file", merge_file)):
        if path and not Path(path).is_file():
            raise ValueError(f"{name} is {path}, which is not a file")
    if tokenizer_type != "HuggingFaceTokenizer" and tokenizer_model and not Path(tokenizer_model).is_file():
        raise ValueError(f"--tokenizer-model is {tokenizer_model}, which is not a file")

    try:
        if tokenizer_type == "GPT2BPETokenizer":
            with _gpt2_folder(Path(str(vocab_file)), Path(str(merge_file))) as folder:
                tokenizer = MegatronTokenizer.from_pretrained(folder, {"library": "huggingface"}, use_fast=True)
            # Megatron Core names its sample indices after the path; the folder's name is another each time.
            tokenizer.path = vocab_file
            return tokenizer
        library, options = _LIBRARIES[tokenizer_type]
        if library == "tiktoken":
            # Megatron Core gives 1000 ids to special tokens and wants the total, at most 2**17, to fit exactly.
            entries = json.loads(Path(str(tokenizer_model)).read_text(encoding="utf-8"))
            options = {"num_special_tokens": 1000, "vocab_size": min(len(entries) + 1000, 2**17)}
        return MegatronTokenizer.from_pretrained(tokenizer_model, {"library": library}, **options)
    except (ImportError, NameError, OSError, AssertionError, json.JSONDecodeError) as error:
        raise ValueError(
            f"--tokenizer-type {tokenizer_type} cannot be built ({error}); are its files right, and "
            "megatron_lazarus[tokenizers] installed?"
        ) from error


def identity(tokenizer_type: str, tokenizer: Any) -> TokenizerIdentity:
    """Return what is recorded of ``tokenizer`` in side files."""
    return TokenizerIdentity(tokenizer_type, int(tokenizer.vocab_size), int(tokenizer.eod))


def padded_vocab_size(vocab_size: int, divisible_by: int) -> int:
    """Return ``vocab_size`` rounded up to a multiple of ``divisible_by``; raises ValueError if that is below 1."""
    if divisible_by < 1:
        raise ValueError(f"--make-vocab-size-divisible-by is {divisible_by}; it must be at least 1")
    return -(-vocab_size // divisible_by) * divisible_by


@contextmanager
def _gpt2_folder(vocab_file: Path, merge_file: Path) -> Iterator[str]:
    """A folder that Hugging Face takes for GPT-2's: Megatron Core's own class wants to download it by name."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(vocab_file, Path(folder, "vocab.json"))
        shutil.copy(merge_file, Path(folder, "merges.txt"))
        end = "<|endoftext|>"
        settings = {"tokenizer_class": "GPT2Tokenizer", "bos_token": end, "eos_token": end, "unk_token": end}
        Path(folder, "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
        yield folder
