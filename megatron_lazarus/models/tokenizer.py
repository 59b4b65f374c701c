"""Tokenizers by the names Megatron users know, and the side file that ties a data set to one of them."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

BYTE_LEVEL = "ByteLevelTokenizer"
SENTENCEPIECE = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")
NEEDS_MODEL = ("HuggingFaceTokenizer", "TikTokenizer", *SENTENCEPIECE)
TOKENIZER_TYPES = (BYTE_LEVEL, "GPT2BPETokenizer", *NEEDS_MODEL)


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

    library, path, options = _library(tokenizer_type, tokenizer_model, vocab_file, merge_file)
    try:
        return MegatronTokenizer.from_pretrained(path, {"library": library}, **options)
    except (ImportError, NameError) as error:
        raise ValueError(
            f"--tokenizer-type {tokenizer_type} needs a package that is not installed ({error}); "
            "install megatron_lazarus[tokenizers]"
        ) from error


def identity(tokenizer_type: str, tokenizer: Any) -> TokenizerIdentity:
    """Return what is recorded of ``tokenizer`` in side files."""
    return TokenizerIdentity(tokenizer_type, int(tokenizer.vocab_size), int(tokenizer.eod))


def padded_vocab_size(vocab_size: int, divisible_by: int) -> int:
    """Return ``vocab_size`` rounded up to a multiple of ``divisible_by``; raises ValueError if that is below 1."""
    if divisible_by < 1:
        raise ValueError(f"--make-vocab-size-divisible-by is {divisible_by}; it must be at least 1")
    return -(-vocab_size // divisible_by) * divisible_by


def _library(
    tokenizer_type: str, model: str | None, vocab_file: str | None, merge_file: str | None
) -> tuple[str, str | None, dict[str, Any]]:
    if tokenizer_type == BYTE_LEVEL:
        options = {"vocab_size": 256, "special_tokens": ["<eod>", "<pad>"], "_eos_id": 257, "_pad_id": 256}
        return "byte-level", None, options
    if tokenizer_type == "GPT2BPETokenizer":
        return "megatron", tokenizer_type, {"vocab_file": vocab_file, "merges_file": merge_file}
    if tokenizer_type == "HuggingFaceTokenizer":
        return "huggingface", model, {"vocab_file": vocab_file, "merges_file": merge_file}
    if tokenizer_type == "TikTokenizer":
        return "tiktoken", model, {}
    return "sentencepiece", model, {}
