"""Snapshots: copies of state in host memory, taken while training computes, before the next update changes it."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megatron_lazarus.checkpoint.image import FileImage, Layout, page_aligned

COPY_LIMIT_S = 300.0
"""How long an update waits for a copy in memory before something must be wrong."""


class HostBuffer:
    """One reusable area of host memory, page-locked where the state is on a CUDA device."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def images(self, files: Mapping[str, Mapping[str, Tensor]]) -> dict[str, FileImage]:
        """Room for files with copies of such tensors, by file and name. It holds until the next call."""
        layouts = {name: Layout.of(tensors) for name, tensors in files.items()}
        size = sum(layout.pages for layout in layouts.values())
        if size > self._bytes.numel():
            pinned = any(tensor.is_cuda for tensors in files.values() for tensor in tensors.values())
            self._bytes = page_aligned(size, pinned)
        images, end = {}, 0
        for name, layout in layouts.items():
            start, end = end, end + layout.pages
            images[name] = FileImage.within(self._bytes[start:end], layout, files[name])
        return images


class BufferPool:
    """Three buffers: one that a snapshot fills, one that is written to storage, one for whichever is late."""

    def __init__(self, count: int = 3) -> None:
        self._free = [HostBuffer() for _ in range(count)]
        self._changed = threading.Condition()

    def take(self, limit_s: float) -> HostBuffer | None:
        """A free buffer, or None if none becomes free in time."""
        with self._changed:
            return self._free.pop() if self._changed.wait_for(lambda: bool(self._free), limit_s) else None

    def give_back(self, buffer: HostBuffer) -> None:
        with self._changed:
            self._free.append(buffer)
            self._changed.notify_all()


class Snapshot:
    """A copy in progress: ``pairs`` of a source and a target of its shape.

    ``ordered()`` must be called before the sources change. On CUDA the copy runs on a stream of its own and the
    device waits, not the host; elsewhere a thread copies.
    """

    def __init__(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        self._pairs = list(pairs)
        self.bytes = sum(source.nbytes for source, _ in pairs)
        self.stalled_s = 0.0
        self._error: BaseException | None = None
        self._done = threading.Event()
        self._event: torch.cuda.Event | None = None
        if any(source.is_cuda for source, _ in pairs):
            self._start_on_device()
        else:
            threading.Thread(target=self._copy, name="lazarus-snapshot", daemon=True).start()

    def _start_on_device(self) -> None:
        device = next(source.device for source, _ in self._pairs if source.is_cuda)
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for source, target in self._pairs:
                target.copy_(source, non_blocking=True)
                if source.is_cuda:
                    source.record_stream(stream)
            self._event = torch.cuda.Event()
            self._event.record(stream)
        self._done.set()

    def _copy(self) -> None:
        try:
            with torch.no_grad():
                for source, target in self._pairs:
                    target.copy_(source)
        except BaseException as error:
            self._error = error
        finally:
            # Here, not where training waits: to let memory go may take milliseconds.
            self._pairs = []
            self._done.set()

    def ordered(self) -> None:
        """Return when the sources may change. Raises TimeoutError."""
        started = time.monotonic()
        if not self._done.wait(COPY_LIMIT_S):
            raise TimeoutError(f"a snapshot of {self.bytes} bytes takes more than {COPY_LIMIT_S:g} s")
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)
        self._pairs = []
        self.stalled_s = time.monotonic() - started

    def wait(self) -> None:
        """Return when the targets hold the copy; raises what went wrong in copying, or TimeoutError."""
        if not self._done.wait(COPY_LIMIT_S):
            raise TimeoutError(f"a snapshot of {self.bytes} bytes takes more than {COPY_LIMIT_S:g} s")
        if self._event is not None:
            self._event.synchronize()
        if self._error is not None:
            raise self._error
