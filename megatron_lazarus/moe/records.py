"""Expert records: all state of one expert of one layer in one aligned row of bytes.

Moving an expert between ranks, snapshotting it, writing it and hashing it are each one contiguous copy of its row.
A record is placement-free: it means the same in any slot of any rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

PARAMETER = "parameter"
MASTER = "master"
STEP = "step"
BUFFER = "buffer"
_FIELD_ALIGNMENT = 64
_ROW_ALIGNMENT = 256


def _align(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment


@dataclass(frozen=True)
class TensorSpec:
    """One parameter of an expert; ``option_group`` is its group in the client optimizer, None if it is frozen."""

    name: str
    shape: tuple[int, ...]
    option_group: int | None = 0

    @property
    def numel(self) -> int:
        return int(torch.Size(self.shape).numel())


@dataclass(frozen=True)
class BufferSpec:
    """One persistent buffer of an expert: a constant of any type."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return int(torch.Size(self.shape).numel()) * self.dtype.itemsize


@dataclass(frozen=True)
class RecordLayout:
    """Where everything of one expert lies in its row.

    ``dtype`` is the parameters' type. Types narrower than float32 get a float32 master copy; optimizer state has
    the type of what the optimizer updates. Fields follow one another, each aligned to 64 bytes, the row to 256; so do
    ``buffers`` within theirs.
    """

    tensors: tuple[TensorSpec, ...]
    dtype: torch.dtype
    state_names: tuple[str, ...]
    buffers: tuple[BufferSpec, ...] = ()
    offsets: dict[str, int] = field(init=False, compare=False)
    nbytes: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        offsets, end = {}, 0
        for name in self.field_names:
            offsets[name] = end = _align(end, _FIELD_ALIGNMENT)
            end += self.field_bytes(name)
        object.__setattr__(self, "offsets", offsets)
        object.__setattr__(self, "nbytes", _align(end, _ROW_ALIGNMENT))

    @property
    def numel(self) -> int:
        return sum(tensor.numel for tensor in self.tensors)

    @property
    def has_master(self) -> bool:
        return self.dtype not in (torch.float32, torch.float64)

    @property
    def update_dtype(self) -> torch.dtype:
        """The type the optimizer computes in."""
        return torch.float32 if self.has_master else self.dtype

    @property
    def field_names(self) -> tuple[str, ...]:
        buffers = (BUFFER,) if self.buffers else ()
        return (PARAMETER, *((MASTER,) if self.has_master else ()), *self.state_names, STEP, *buffers)

    def field_dtype(self, name: str) -> torch.dtype:
        if name in (STEP, BUFFER):
            return torch.float32 if name == STEP else torch.uint8
        return self.dtype if name == PARAMETER else self.update_dtype

    def field_elements(self, name: str) -> int:
        """Elements of ``field_dtype`` in one row: for buffers bytes."""
        if name == BUFFER:
            return max(end for _, end in self.buffer_ranges().values())
        return 1 if name == STEP else self.numel

    def field_bytes(self, name: str) -> int:
        return self.field_elements(name) * self.field_dtype(name).itemsize

    def buffer_ranges(self) -> dict[str, tuple[int, int]]:
        """Byte range of each buffer within its field."""
        result, end = {}, 0
        for spec in self.buffers:
            start = _align(end, _FIELD_ALIGNMENT)
            end = start + spec.nbytes
            result[spec.name] = (start, end)
        return result

    def ranges(self) -> dict[str, tuple[int, int]]:
        """Element range of each tensor within a field."""
        result, start = {}, 0
        for tensor in self.tensors:
            result[tensor.name] = (start, start + tensor.numel)
            start += tensor.numel
        return result

    def segments(self) -> list[tuple[int, int, int]]:
        """(option group, first element, past-the-end element) of maximal runs that one option group owns."""
        runs: list[tuple[int, int, int]] = []
        for tensor, (start, end) in zip(self.tensors, self.ranges().values(), strict=True):
            if tensor.option_group is None:
                continue
            if runs and runs[-1][0] == tensor.option_group and runs[-1][2] == start:
                runs[-1] = (tensor.option_group, runs[-1][1], end)
            else:
                runs.append((tensor.option_group, start, end))
        return runs


class RecordBuffer:
    """The records of one layer on one rank: ``rows[slot]`` is a record, ``experts[slot]`` says whose.

    ``gradients`` [slots, numel] stands beside the rows: gradients are not state and never travel with a record.
    """

    def __init__(self, layout: RecordLayout, experts: Sequence[int], device: torch.device) -> None:
        self.layout = layout
        self.experts = tuple(experts)
        self.rows = torch.zeros(len(self.experts), layout.nbytes, dtype=torch.uint8, device=device)
        self.gradients = torch.zeros(len(self.experts), layout.numel, dtype=layout.dtype, device=device)

    def field(self, name: str) -> torch.Tensor:
        """View of one field of all rows: [slots, numel], for the step count [slots, 1], for buffers [slots, bytes]."""
        start = self.layout.offsets[name]
        return self.rows[:, start : start + self.layout.field_bytes(name)].view(self.layout.field_dtype(name))

    def buffer_views(self, slot: int) -> dict[str, torch.Tensor]:
        """The buffers of the record in ``slot`` by name."""
        ranges = self.layout.buffer_ranges()
        flat = self.field(BUFFER)[slot] if ranges else None
        return {
            spec.name: flat[slice(*ranges[spec.name])].view(spec.dtype).view(spec.shape)
            for spec in self.layout.buffers
            if flat is not None
        }

    def named_tensors(self, slot: int) -> dict[str, torch.Tensor]:
        """Views of all tensors of the record in ``slot``: ``<field>/<tensor>``, and ``step`` (one element)."""
        views: dict[str, torch.Tensor] = {}
        ranges = self.layout.ranges()
        for name in self.layout.field_names:
            flat = self.field(name)[slot]
            if name == STEP:
                views[STEP] = flat
                continue
            if name == BUFFER:
                views |= {f"{BUFFER}/{key}": view for key, view in self.buffer_views(slot).items()}
                continue
            for tensor in self.layout.tensors:
                start, end = ranges[tensor.name]
                views[f"{name}/{tensor.name}"] = flat[start:end].view(tensor.shape)
        return views

    def first_slots(self) -> dict[int, int]:
        """The slot that computes for each expert held here; further replicas on this rank mirror it."""
        slots: dict[int, int] = {}
        for slot, expert in enumerate(self.experts):
            slots.setdefault(expert, slot)
        return slots

    def extended(self, other: RecordBuffer) -> RecordBuffer:
        """A buffer with these records, and behind them those of ``other`` whose experts are not among them."""
        more = [slot for expert, slot in other.first_slots().items() if expert not in self.experts]
        both = RecordBuffer(self.layout, (*self.experts, *(other.experts[slot] for slot in more)), self.rows.device)
        both.rows[: len(self.experts)] = self.rows
        for row, slot in enumerate(more, start=len(self.experts)):
            both.rows[row] = other.rows[slot]
        return both
