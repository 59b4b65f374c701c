"""Writes tensors as safetensors files, one part of a record at a time: no model, no process group, no copy."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import io
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from megatron_lazarus.checkpoint.image import FileImage
from megatron_lazarus.checkpoint.manifest import FileEntry, PartEntry

CONTENTS = ("all", "moments")
MASTER = "master"
PARAMETER = "parameter"
BUFFER = "buffer"
STEP = "step"
_CHUNK = 8 << 20
_DIRECT = getattr(os, "O_DIRECT", 0)
_NOT_DIRECT = (errno.EINVAL, errno.EFAULT, errno.EOPNOTSUPP)


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


def write_image(directory: str, name: str, image: FileImage, between: Callable[[], None] = lambda: None) -> FileEntry:
    """Write a new file and flush it; returns its size and checksum.

    ``between`` is called every few MiB, and may raise to give up: then, as after any error, no file is left. Raises
    OSError, FileExistsError included: nothing is ever written over.
    """
    digest = hashlib.sha256()
    array: Any = image.memory.numpy()
    pages = memoryview(array)
    with _new_file(os.path.join(directory, name)) as file:
        _bypass_cache(file)
        for start in range(0, len(pages), _CHUNK):
            between()
            digest.update(pages[start : min(start + _CHUNK, image.size)])
            _write(file, pages[start : start + _CHUNK])
        file.truncate(image.size)
    return FileEntry(name, image.size, digest.hexdigest())


def write_bytes(directory: str, name: str, data: bytes) -> FileEntry:
    """Like ``write_image``, for a small file of another kind."""
    with _new_file(os.path.join(directory, name)) as file:
        _write(file, memoryview(data))
    return FileEntry(name, len(data), hashlib.sha256(data).hexdigest())


@contextlib.contextmanager
def _new_file(path: str) -> Iterator[io.FileIO]:
    """A file that is flushed at the end, or removed after an error."""
    with open(path, "xb", buffering=0) as file:
        try:
            yield file
            os.fsync(file.fileno())
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            raise


def _bypass_cache(file: io.FileIO, wanted: bool = True) -> None:
    """Let the device fetch the data from where they are, if the file system can.

    The page cache takes a copy of all of it, for which it first has to find memory: that costs training more of the
    processor than everything else about a save, and what training reads is displaced.
    """
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    with contextlib.suppress(OSError):
        fcntl.fcntl(file, fcntl.F_SETFL, flags | _DIRECT if wanted else flags & ~_DIRECT)


def _write(file: io.FileIO, data: memoryview) -> None:
    while len(data):
        try:
            data = data[file.write(data) :]
        except OSError as error:
            # Some file systems say only now that they cannot, and after a short write the rest is not aligned.
            if error.errno not in _NOT_DIRECT or not fcntl.fcntl(file, fcntl.F_GETFL) & _DIRECT:
                raise
            _bypass_cache(file, wanted=False)


def write_part(
    save_dir: str,
    tag: str,
    name: str,
    image: FileImage,
    *,
    step: int,
    tokens: float,
    between: Callable[[], None] = lambda: None,
) -> PartEntry:
    """Write one part of an expert's record; its folder exists. Tensors: ``<field>/<tensor>`` and ``step``."""
    entry = write_image(os.path.join(save_dir, tag), name, image, between)
    fields = list(dict.fromkeys(key.partition("/")[0] for key in image.tensors))
    return PartEntry(tag, entry.name, entry.bytes, entry.sha256, step, tokens, fields)
