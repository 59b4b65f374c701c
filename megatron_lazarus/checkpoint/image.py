"""A safetensors file laid out in memory as it will be on storage, so that it is written from there without a copy."""

from __future__ import annotations

import json
import mmap
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

PAGE = max(4096, mmap.PAGESIZE)
"""Storage takes data past the page cache from memory, to offsets and in amounts that are multiples of this."""

_ALIGNMENT = 64
"""Of the tensors' first byte: copies are fastest then."""

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


@dataclass(frozen=True)
class Layout:
    """What is where in a file: its ``header``, then the tensors, each from ``offsets[name]`` on; ``size`` in bytes."""

    header: bytes
    offsets: dict[str, int]
    size: int

    @property
    def pages(self) -> int:
        """Bytes of whole pages."""
        return -(-self.size // PAGE) * PAGE

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Layout:
        """The layout of a file with such tensors: there are no gaps, and each begins at a multiple of its item size."""
        entries: dict[str, object] = {}
        starts, end = {}, 0
        for name in sorted(tensors, key=lambda name: -tensors[name].element_size()):
            tensor = tensors[name]
            starts[name], end = end, end + tensor.nbytes
            span = [starts[name], end]
            entries[name] = {"dtype": TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": span}
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % _ALIGNMENT)
        header = len(text).to_bytes(8, "little") + text
        return cls(header, {name: len(header) + start for name, start in starts.items()}, len(header) + end)


@dataclass(frozen=True)
class FileImage:
    """A file in memory: the first ``size`` of the bytes of ``memory``, which is whole pages.

    ``tensors``: views of it, by name, for whoever fills them.
    """

    memory: Tensor
    size: int
    tensors: Mapping[str, Tensor]

    @classmethod
    def within(cls, memory: Tensor, layout: Layout, tensors: Mapping[str, Tensor]) -> FileImage:
        """An image whose tensors, like ``tensors``, are not filled yet. ``memory``: uint8, ``layout.pages`` bytes."""
        memory[: len(layout.header)] = torch.frombuffer(bytearray(layout.header), dtype=torch.uint8)
        # What follows the end is written, and cut off, with the last page: it should not be anyone's data.
        memory[layout.size :] = 0
        views = {
            name: memory[start : start + tensors[name].nbytes].view(tensors[name].dtype).view(tensors[name].shape)
            for name, start in layout.offsets.items()
        }
        return cls(memory, layout.size, views)

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> FileImage:
        """An image in memory of its own, with copies of ``tensors``."""
        layout = Layout.of(tensors)
        image = cls.within(page_aligned(layout.pages), layout, tensors)
        for name, tensor in tensors.items():
            image.tensors[name].copy_(tensor)
        return image


def page_aligned(size: int, pinned: bool = False) -> Tensor:
    """``size`` bytes, uint8, that begin with a page. They are not filled: whoever copies first makes the pages."""
    memory = torch.empty(size + PAGE, dtype=torch.uint8, pin_memory=pinned)
    start = -memory.data_ptr() % PAGE
    return memory[start : start + size]
