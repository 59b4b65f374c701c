"""Writes tensors as safetensors files, one part of a record at a time: no model, no process group, no copy."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_lazarus.checkpoint.manifest import FileEntry, PartEntry

CONTENTS = ("all", "moments")
MASTER = "master"
PARAMETER = "parameter"
BUFFER = "buffer"
STEP = "step"
_CHUNK = 8 << 20

TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The types that a file can hold, with their safetensors names."""


def record_file(layer: int, expert: int, *, master: bool = False, suffix: str = "") -> str:
    """The file of a record, or of its weights alone (``master``), relative to the tag directory.

    ``suffix`` tells files of several attempts at one tag apart.
    """
    return f"experts/layer_{layer}_expert_{expert}{'.master' if master else ''}{suffix}.safetensors"


def weight_field(fields: Sequence[str]) -> str:
    """The field that weights are restored from: the master copy where there is one."""
    return MASTER if MASTER in fields else PARAMETER


def parts_of(content: str, selected: bool, fields: Sequence[str]) -> list[tuple[bool, list[str]]]:
    """What one save writes of an expert: (whether it is the part with the weights alone, its fields) of every file."""
    if content == "all":
        return [(False, list(fields))] if selected else []
    weights = weight_field(fields)
    rest = [(False, [name for name in fields if name != weights])] if selected else []
    return [(True, [weights]), *rest]


def write_tensors(
    directory: str, name: str, tensors: Mapping[str, Tensor], between: Callable[[], None] = lambda: None
) -> FileEntry:
    """Write a new file of contiguous CPU tensors and flush it; returns its size and checksum.

    ``between`` is called every few MiB, and may raise to give up: then, as after any error, no file is left. Raises
    OSError, FileExistsError included: nothing is ever written over.
    """
    header: dict[str, object] = {}
    end = 0
    for key, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        header[key] = {"dtype": TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return _write_new(
        directory, name, [len(text).to_bytes(8, "little") + text, *map(_bytes_of, tensors.values())], between
    )


def write_bytes(directory: str, name: str, data: bytes) -> FileEntry:
    """Like ``write_tensors``, for a file of another kind."""
    return _write_new(directory, name, [data], lambda: None)


def _write_new(
    directory: str, name: str, blocks: Sequence[bytes | memoryview], between: Callable[[], None]
) -> FileEntry:
    digest, size = hashlib.sha256(), 0
    path = os.path.join(directory, name)
    with open(path, "xb", buffering=0) as file:
        try:
            for block in blocks:
                view = memoryview(block)
                for start in range(0, len(view), _CHUNK):
                    between()
                    chunk = view[start : start + _CHUNK]
                    digest.update(chunk)
                    while len(chunk):
                        chunk = chunk[file.write(chunk) :]
                size += len(view)
            os.fsync(file.fileno())
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            raise
    return FileEntry(name, size, digest.hexdigest())


def write_part(
    save_dir: str,
    tag: str,
    name: str,
    tensors: Mapping[str, Tensor],
    *,
    step: int,
    tokens: float,
    between: Callable[[], None] = lambda: None,
) -> PartEntry:
    """Write one part of an expert's record; its folder exists. ``tensors``: ``<field>/<tensor>`` and ``step``."""
    entry = write_tensors(os.path.join(save_dir, tag), name, tensors, between)
    fields = list(dict.fromkeys(key.partition("/")[0] for key in tensors))
    return PartEntry(tag, entry.name, entry.bytes, entry.sha256, step, tokens, fields)


def _bytes_of(tensor: Tensor) -> memoryview:
    data: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(data)
